"""What makes a prefix valid for a model: a digest of its weights and of all that changes its numbers."""

from __future__ import annotations

import hashlib
import secrets
import threading
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from .adapters import unwrapped
from .checksum import tensor_checksum
from .exceptions import FingerprintMismatchError
from .glance import Glance
from .model_settings import same_architecture, settings_of
from .model_tensors import acting_adapters, acting_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check_fingerprint", "fingerprint_of", "invalidate_fingerprint", "same_architecture"]

_process = secrets.randbits(64)
_lock = threading.RLock()


@dataclass
class _Known:
    """What is known of a model: what was seen of it last, and the checksums of its tensors.

    Attributes:
        glance: What was seen.
        checksums: Of each weight, by the mark that tells it apart without reading it.
        digests: The fingerprint, with adapters and without them.
    """

    glance: Glance
    checksums: dict[tuple[object, ...], str] = field(default_factory=dict)
    digests: dict[bool, str] = field(default_factory=dict)


_known: weakref.WeakKeyDictionary[torch.nn.Module, _Known] = weakref.WeakKeyDictionary()


def fingerprint_of(model: PreTrainedModel, *, without_adapters: bool = False) -> str:
    """Return a digest of everything that decides the numbers ``model`` computes.

    It covers class, configuration, attention implementation, names, shapes, dtypes and values of parameters and
    buffers, the scales of quantized weights, and which adapters act with which scale. Where no adapter acts, it is
    that of the base model.

    All values are read once. Later calls look at identities, version counters, optimizer steps, adapters, settings and
    a few values of each parameter (adapters: all), and read again only what may have changed. Of weights that
    accelerate has offloaded to disk, they look at the files' size and time. A write that none of these shows (single
    values through ``.data``) has to be told with `hpc.invalidate`.

    Args:
        model: The model; one inside PEFT's wrapper has the fingerprint of its wrapper.
        without_adapters: The fingerprint that it has with all adapters switched off.

    Returns:
        64 hexadecimal digits, equal in every process for equal weights and settings.

    Example:
        >>> import torch, hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> before = hpc.fingerprint_of(model)
        >>> _ = torch.nn.init.ones_(model.lm_head.weight)
        >>> hpc.fingerprint_of(model) == before
        False
    """
    model = unwrapped(model)
    with _lock:
        known = _known.get(model)
        if known is None or not known.glance.is_unchanged(model):
            known = _known[model] = _look_again(model, known)
        if without_adapters not in known.digests:
            known.digests[without_adapters] = _digest(model, known, ignored=without_adapters)
        return known.digests[without_adapters]


def invalidate_fingerprint(model: PreTrainedModel) -> list[str]:
    """Forget what is known of ``model``, so that the next `fingerprint_of` reads all of its values.

    Returns:
        The fingerprints that were known, which may have been those of other values.
    """
    with _lock:
        known = _known.pop(unwrapped(model), None)
    return [] if known is None else list(known.digests.values())


def check_fingerprint(what: str, fingerprint: str, model: PreTrainedModel, *, allow_base: bool = False) -> None:
    """Raise `FingerprintMismatchError` unless ``what`` was computed by ``model`` in the state that it is in.

    Args:
        what: How the error calls it.
        fingerprint: Of the model that computed it.
        model: The model that is to use it.
        allow_base: Accept what the model computes with all adapters switched off, too.
    """
    current = fingerprint_of(model)
    if fingerprint == current:
        return
    is_base = fingerprint == fingerprint_of(model, without_adapters=True)
    if is_base and allow_base:
        return
    remedy = (
        "it is of the base model without the adapters, and serves adapters that act later if you pass allow_base=True"
        if is_base
        else "other weights, settings, adapters or dtype; prefill it again"
    )
    raise FingerprintMismatchError(
        f"{what} was computed by a model with fingerprint {fingerprint[:12]}, but {type(model).__name__} now has "
        f"{current[:12]}: {remedy}"
    )


def _look_again(model: PreTrainedModel, known: _Known | None) -> _Known:
    """Return what is known after a new look at ``model``: of what was known, all that must still be right."""
    glance = Glance(model)
    suspects = None if known is None else known.glance.suspects(glance)
    if known is None or suspects is None:
        return _Known(glance)
    return _Known(glance, {mark: seen for mark, seen in known.checksums.items() if mark[0] not in suspects})


def _digest(model: PreTrainedModel, known: _Known, *, ignored: bool) -> str:
    """Return the fingerprint; the known checksums are used and completed."""
    acting = acting_adapters(model, ignored=ignored)
    hasher = hashlib.sha256(settings_of(model).encode())
    for name, layer in sorted(acting.items()):
        if layer.description:
            hasher.update(f"{name} {layer.description}\n".encode())
    for name, weight in sorted(acting_weights(model, acting).items()):
        if weight.on_disk is None and weight.tensor.device.type == "meta":
            # Weights without values, of a model that cannot run: they equal only themselves, in this process.
            seen = str(_process ^ id(weight.tensor))
        else:
            if weight.mark not in known.checksums:
                known.checksums[weight.mark] = _described(weight.read())
            seen = known.checksums[weight.mark]
        hasher.update(f"{name} {seen}\n".encode())
    return hasher.hexdigest()


def _described(tensor: torch.Tensor) -> str:
    plain = tensor.detach().as_subclass(torch.Tensor)  # packed weights answer for themselves otherwise
    return f"{tuple(plain.shape)} {plain.dtype} {tensor_checksum(plain)}"
