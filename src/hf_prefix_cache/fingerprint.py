"""What makes a prefix valid for a model: a digest of its weights and of all that changes its numbers."""

import hashlib
import json
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedConfig, PreTrainedModel

from .compat import attention_implementation, decoder_config

__all__ = ["fingerprint_of", "invalidate_fingerprint", "same_architecture"]

_SAMPLES = 8  # values of each parameter that are compared at every call
_COLUMNS = 4096  # width in which a tensor's bytes are summed
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

_lock = threading.RLock()
_optimizer_steps = 0


@dataclass
class _Known:
    """A fingerprint and what was seen of the model when it was computed."""

    marks: tuple[object, ...]
    samples: torch.Tensor
    digest: str


_known: "weakref.WeakKeyDictionary[torch.nn.Module, _Known]" = weakref.WeakKeyDictionary()


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


# Fused optimizers leave the version counters of parameters untouched; this hook fires for all of torch's.
register_optimizer_step_post_hook(_count_step)


def fingerprint_of(model: PreTrainedModel) -> str:
    """Return a digest of everything that decides the numbers ``model`` computes.

    It covers class, configuration, attention implementation, and names, shapes, dtypes and values of parameters and
    buffers. All values are read once; later calls compare identities, version counters, optimizer steps and a few
    values of each parameter, and read everything again only if one of them changed. A write that none of these shows
    (single values through ``.data``) has to be told with `hpc.invalidate`.

    Args:
        model: The model.

    Returns:
        64 hexadecimal digits, equal in every process for equal weights and settings.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> before = fingerprint_of(model)
        >>> _ = torch.nn.init.ones_(model.lm_head.weight)
        >>> fingerprint_of(model) == before
        False
    """
    with _lock:
        tensors = [*model.named_parameters(), *model.named_buffers()]
        marks = (_optimizer_steps, _settings(model), *(_mark(tensor) for _, tensor in tensors))
        samples = _sample([tensor for _, tensor in tensors])
        known = _known.get(model)
        if known is not None and known.marks == marks and torch.equal(known.samples, samples):
            return known.digest
        hasher = hashlib.sha256(_settings(model).encode())
        for name, tensor in sorted(tensors, key=lambda item: item[0]):
            hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)}\n".encode())
        _known[model] = _Known(marks, samples, hasher.hexdigest())
        return _known[model].digest


def invalidate_fingerprint(model: PreTrainedModel) -> None:
    """Forget what is known of ``model``, so that the next `fingerprint_of` reads all of its values."""
    with _lock:
        _known.pop(model, None)


def same_architecture(config: PreTrainedConfig, other: PreTrainedConfig) -> bool:
    """Return whether two decoder configurations describe models that compute the same, but for weights and dtype."""
    if config is other:
        return True
    ours, theirs = _entries(config), _entries(other)
    ours.pop("dtype", None)
    theirs.pop("dtype", None)
    return ours == theirs


def _entries(config: PreTrainedConfig) -> dict[str, Any]:
    return {key: value for key, value in config.to_dict().items() if key not in _IRRELEVANT}


def _settings(model: PreTrainedModel) -> str:
    config = _entries(model.config)
    decoder = decoder_config(model.config)
    return json.dumps(
        [type(model).__name__, attention_implementation(decoder), _drops_out(model, config), config],
        sort_keys=True,
        default=str,
    )


def _drops_out(model: PreTrainedModel, config: dict[str, object]) -> bool:
    """Return whether ``model`` computes with random dropout now: such a prefix fits no other call."""
    return model.training and any(
        ("dropout" in key or "pdrop" in key) and isinstance(value, float) and value > 0
        for key, value in config.items()
    )


def _mark(tensor: torch.Tensor) -> tuple[object, ...]:
    # Tensors made in inference mode have no version counter and refuse the question.
    version = None if tensor.is_inference() else tensor._version
    return id(tensor), tensor.data_ptr() if tensor.device.type != "meta" else 0, version


@torch.no_grad()
def _sample(tensors: list[torch.Tensor]) -> torch.Tensor:
    samples = [torch.zeros(0)]
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.numel():
            flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach().flatten()
            picked = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
            samples.append(picked.to(device="cpu", dtype=torch.float32).reshape(-1))
    return torch.cat(samples)


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit sum over the bytes of ``tensor`` that any one changed value changes.

    Every value enters with a weight that depends on its place. Overflow wraps around, which loses nothing.
    """
    if tensor.device.type == "meta":
        return 0
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    padding = -raw.numel() % (4 * _COLUMNS)
    if padding:
        raw = torch.cat([raw, raw.new_zeros(padding)])
    table = raw.view(torch.int32).reshape(-1, _COLUMNS)
    by_row, by_column = table.sum(1, dtype=torch.int64), table.sum(0, dtype=torch.int64)
    total = 0
    for sums in (by_row, by_column):
        weights = torch.arange(1, sums.numel() + 1, device=sums.device) * 2654435761 | 1
        total = (total * 31 + int((sums * weights).sum())) % 2**64
    return total
