"""What beside weights decides the numbers that a model computes: configuration, attention, dropout, numerics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from .compat import attention_implementation, decoder_config
from .weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["config_values", "numerics_of", "same_architecture", "settings_of"]

# Configuration entries that say how a model was saved or is called, not what it computes.
_IRRELEVANT = frozenset(
    {
        "_name_or_path",
        "architectures",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "torchscript",
        "transformers_version",
        "use_cache",
    }
)


def settings_of(model: PreTrainedModel) -> str:
    """Return all settings of ``model`` as text, equal in every process for equal settings."""
    decoder = decoder_config(model.config)
    entries = _entries(model.config)
    dropout = _drops_out(model, entries)
    return _text([type(model).__name__, attention_implementation(decoder), dropout, numerics_of(model), entries])


def numerics_of(model: PreTrainedModel) -> list[str]:
    """Return the settings of this process and thread that change what ``model`` computes."""
    kind = input_device(model).type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return [str(torch.get_autocast_dtype(kind) if is_on else None), torch.get_float32_matmul_precision()]


def config_values(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the values of ``config`` and of those inside it as they are held: cheap, and not to be changed."""
    # Configurations look every name up elsewhere first, which takes longer than all else here.
    held: dict[str, Any] = object.__getattribute__(config, "__dict__")
    values = [{key: value for key, value in held.items() if not isinstance(value, PreTrainedConfig)}]
    for value in held.values():
        if isinstance(value, PreTrainedConfig):
            values += config_values(value)
    return values


def same_architecture(config: PreTrainedConfig, other: PreTrainedConfig) -> bool:
    """Return whether two decoder configurations describe models that compute the same, but for weights and dtype."""
    if config is other:
        return True
    ours, theirs = _entries(config), _entries(other)
    ours.pop("dtype", None)
    theirs.pop("dtype", None)
    return ours == theirs or _text(ours) == _text(theirs)  # as text where one of them was saved as text


def _entries(config: PreTrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _IRRELEVANT}


def _text(values: Any) -> str:
    return json.dumps(
        values,
        sort_keys=True,
        default=lambda value: sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value),
    )


def _drops_out(model: PreTrainedModel, entries: dict[str, Any]) -> bool:
    """Return whether ``model`` computes with random dropout now: such a prefix does not fit evaluation."""
    return any(
        ("dropout" in key or "pdrop" in key) and isinstance(value, float) and value > 0
        for key, value in entries.items()
    ) and any(module.training for module in model.modules())
