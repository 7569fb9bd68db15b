"""Every weight that decides what a model computes, by a name that its adapters do not change."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .adapters import ActingAdapters, holds_adapters
from .compat import original_max_positions
from .weights import Weight, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["acting_adapters", "acting_weights", "follows_length"]


def acting_weights(model: PreTrainedModel, acting: dict[str, ActingAdapters]) -> dict[str, Weight]:
    """Return all weights of ``model`` that take part, by name.

    Args:
        model: The model.
        acting: Its layers with adapters, by name.
    """
    skips = follows_length(model)
    named = ((_name_without_adapters(weight.name, acting), weight) for weight in weights_of(model))
    return {name: weight for name, weight in named if name is not None and not (skips and name.endswith("inv_freq"))}


def acting_adapters(model: PreTrainedModel, *, ignored: bool) -> dict[str, ActingAdapters]:
    """Return the layers of ``model`` that hold adapters, by name.

    Args:
        model: The model.
        ignored: Take all adapters for switched off.
    """
    return {
        name: ActingAdapters(module, ignored=ignored)
        for name, module in model.named_modules()
        if holds_adapters(module)
    }


def follows_length(model: PreTrainedModel) -> bool:
    """Return whether rotary frequencies follow the sequence length: then the configuration decides them."""
    return original_max_positions(model.config) is not None


def _name_without_adapters(name: str, acting: dict[str, ActingAdapters]) -> str | None:
    """Return the name that a weight has where no adapters are, or None if it belongs to one that does not act."""
    if not acting:
        return name
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        layer = acting.get(".".join(parts[:end]))
        if layer is not None:
            kept = layer.keeps(".".join(parts[end:]))
            if kept is None:
                return None
            parts = [*parts[:end], *kept.split(".")]
    return ".".join(parts)
