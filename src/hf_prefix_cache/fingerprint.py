"""What makes a prefix valid for a model: a digest of its weights and of all that changes its numbers."""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import PreTrainedConfig

from .compat import attention_implementation, decoder_config, original_max_positions
from .exceptions import FingerprintMismatchError
from .weights import Weight, input_device, weights_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_fingerprint", "fingerprint_of", "invalidate_fingerprint", "same_architecture"]

_SAMPLES = 8  # values of each parameter that are compared at every call
_WORDS = 2**14  # words of 8 bytes in a row that is summed at once: what a processor's cache holds
_MIXER = 0x1E3779B97F4A7C15  # odd, with bits all over
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

_process = secrets.randbits(64)
_lock = threading.RLock()
_optimizer_steps = 0


@dataclass
class _Known:
    """A fingerprint and what was seen of the model when it was computed."""

    marks: tuple[object, ...]
    samples: torch.Tensor
    digest: str


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


# Fused optimizers leave the version counters of parameters untouched; this hook fires for all of torch's.
register_optimizer_step_post_hook(_count_step)


def fingerprint_of(model: PreTrainedModel) -> str:
    """Return a digest of everything that decides the numbers ``model`` computes.

    It covers class, configuration, attention implementation, and names, shapes, dtypes and values of parameters and
    buffers. All values are read once; later calls compare identities, version counters, optimizer steps and a few
    values of each parameter, and read everything again only if one of them changed. Of weights that accelerate has
    offloaded to disk, they compare the files' size and time. A write that none of these shows (single values through
    ``.data``) has to be told with `hpc.invalidate`.

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
        weights = list(_constant_weights(model))
        marks = (_optimizer_steps, _settings(model), *(weight.mark for weight in weights))
        samples = _sample([weight.tensor for weight in weights])
        known = _known.get(model)
        if known is not None and known.marks == marks and torch.equal(known.samples, samples):
            return known.digest
        hasher = hashlib.sha256(_settings(model).encode())
        for weight in sorted(weights, key=lambda weight: weight.name):
            tensor = weight.read()
            hasher.update(f"{weight.name} {tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)}\n".encode())
        _known[model] = _Known(marks, samples, hasher.hexdigest())
        return _known[model].digest


def invalidate_fingerprint(model: PreTrainedModel) -> None:
    """Forget what is known of ``model``, so that the next `fingerprint_of` reads all of its values."""
    with _lock:
        _known.pop(model, None)


def check_fingerprint(what: str, fingerprint: str, model: PreTrainedModel, *, allow_base: bool = False) -> None:
    """Raise `FingerprintMismatchError` unless ``what`` was computed by ``model`` in the state that it is in."""
    current = fingerprint_of(model)
    if fingerprint != current:
        raise FingerprintMismatchError(
            f"{what} was computed by a model with fingerprint {fingerprint[:12]}, but {type(model).__name__} now has "
            f"{current[:12]}: other weights, settings or dtype; prefill it again"
        )


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


def _constant_weights(model: PreTrainedModel) -> Iterator[Weight]:
    """Yield the weights but for rotary frequencies that follow the sequence length: the configuration decides them."""
    follows_length = original_max_positions(model.config) is not None
    for weight in weights_of(model):
        if not (follows_length and weight.name.endswith("inv_freq")):
            yield weight


def _settings(model: PreTrainedModel) -> str:
    config = _entries(model.config)
    decoder = decoder_config(model.config)
    kind = input_device(model).type
    is_on = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    autocast = torch.get_autocast_dtype(kind) if is_on else None
    numerics = [str(autocast), torch.get_float32_matmul_precision()]
    return json.dumps(
        [type(model).__name__, attention_implementation(decoder), _drops_out(model, config), numerics, config],
        sort_keys=True,
        default=lambda value: sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value),
    )


def _drops_out(model: PreTrainedModel, config: dict[str, object]) -> bool:
    """Return whether ``model`` computes with random dropout now: such a prefix does not fit evaluation."""
    return any(
        ("dropout" in key or "pdrop" in key) and isinstance(value, float) and value > 0
        for key, value in config.items()
    ) and any(module.training for module in model.modules())


@torch.no_grad()
def _sample(tensors: list[torch.Tensor]) -> torch.Tensor:
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.device.type != "meta" and tensor.numel():
            flat = tensor.detach().flatten()
            picked = flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES]
            by_device.setdefault(tensor.device, []).append(picked.to(torch.float32))
    # One transfer for each device, not one for each tensor.
    samples = [torch.cat(picked).cpu() for picked in by_device.values()]
    return torch.cat([torch.zeros(0), *samples]).view(torch.int32)  # as bits: NaN differs from itself as a number


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit sum over the bytes of ``tensor`` that any one changed value changes.

    Every word of 8 bytes enters with an odd weight that depends on its place; overflow wraps around, which loses
    nothing then. High bits are mixed into low ones before, since weights leave the highest bit as it is.
    """
    if tensor.device.type == "meta":
        # Weights without values, of a model that cannot run: they equal only themselves, in this process.
        return _process ^ id(tensor)
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // (8 * _WORDS) * (8 * _WORDS)
    tail = raw.new_zeros(8 * _WORDS)
    tail[: raw.numel() - whole] = raw[whole:]
    weights = _weights(_WORDS, tensor.device)
    rows = 1 if tensor.device.type == "cpu" else 2**10  # elsewhere fewer, larger kernels are faster
    parts = (*raw[:whole].view(torch.int64).reshape(-1, _WORDS).split(rows), tail.view(torch.int64)[None])
    sums = torch.cat([((words ^ (words >> 32)) * weights).sum(1) for words in parts])
    return int((sums * _weights(len(sums), tensor.device)).sum()) % 2**64


def _weights(count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(1, count + 1, device=device) * _MIXER) | 1
