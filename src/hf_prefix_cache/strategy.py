"""Which cache for which model, device and memory, and why."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from .architectures import runs_on_static_caches, why_no_static_cache
from .attention import sharing_gate
from .caches import PrefixQuantizedCache
from .caches.base import attention_layers
from .compat import decoder_config, layer_specs
from .exceptions import CacheCapacityError, InputMismatchError
from .key_value_sizes import key_value_widths
from .layers import DYNAMIC_KINDS
from .layers.quantized_kinds import QUANTIZED_KINDS
from .weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["StrategyChoice", "cache_bytes", "choose_strategy", "predicted_bytes"]

_ATTENTION_ONLY = ("full_attention", "sliding_attention", "chunked_attention", "dummy")


# Tokens that are quantized together, by default, and bits of a quantized key or value, scales included.
_GROUP = 32
_BITS = {8: 8.25, 4: 4.625}
# What few bits give up, as measured on a real model after 4,096 tokens of a novel.
_LOSS = {8: "keys and values are off by about 1 %", 4: "keys are off by about 6 % and values by 14 %"}


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy with what it will take and why it was chosen.

    Attributes:
        strategy: Its name.
        predicted_bytes: Bytes of keys and values that it will hold on the model's device.
        free_bytes: Bytes free on the model's device when it was chosen.
        reasons: Why, in words.
        predictions: Bytes that each strategy would hold on the model's device.
        options: Options of the strategy's cache, as ``cache_config`` takes them.

    Example:
        >>> print(StrategyChoice("prefix-dynamic", 2_000_000, 8_000_000_000, ("it runs on the CPU",)))
        prefix-dynamic (2.0 MB): it runs on the CPU
    """

    strategy: str
    predicted_bytes: int
    free_bytes: int
    reasons: tuple[str, ...]
    predictions: Mapping[str, int] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.strategy} ({self.predicted_bytes / 1e6:.1f} MB): " + "; ".join(self.reasons)


def cache_bytes(config: PreTrainedConfig, *, tokens: int, batch_size: int = 1, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of ``tokens`` tokens in ``batch_size`` rows; windows hold their width.

    Running states (Mamba and its like) do not grow with the tokens and are not counted.

    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=3)
        >>> cache_bytes(config, tokens=10, dtype=torch.float32)
        7680
    """
    held = (layer.held(tokens) * layer.token_bytes for layer in _layers(config, dtype))
    return sum(held) * batch_size


def predicted_bytes(
    config: PreTrainedConfig,
    *,
    tokens: int,
    batch_size: int,
    dtype: torch.dtype,
    device: torch.device,
    shared_tokens: int = 0,
) -> dict[str, int]:
    """Return the bytes that each strategy holds on ``device``; ``prefix-quantized`` with 4 bits.

    What all rows share is stored once, but for static buffers. Quantized is what they share, or every token where
    they share nothing.
    """
    layers = _layers(config, dtype)
    growing = 0
    for layer in layers:
        own, shared = layer.own_and_shared(tokens, shared_tokens)
        growing += (shared + batch_size * own) * layer.token_bytes
    # Of layers in host memory two are on the device at a time: one that computes, and the next on its way.
    apart = sum(layer.held(tokens) * layer.token_bytes for layer in layers if layer.window is not None)
    apart += 2 * tokens * max((layer.token_bytes for layer in layers if layer.window is None), default=0)
    return {
        "prefix-dynamic": growing,
        "prefix-static": cache_bytes(config, tokens=tokens, batch_size=batch_size, dtype=dtype),
        "prefix-offloaded": growing if device.type == "cpu" else min(growing, apart * batch_size),
        "prefix-quantized": _quantized_bytes(
            config, 4, tokens=tokens, batch_size=batch_size, dtype=dtype, shared_tokens=shared_tokens
        ),
    }


class _Layer(NamedTuple):
    """What a layer that attends keeps: the last ``window`` tokens, or all, each in ``token_bytes``."""

    window: int | None
    token_bytes: int

    def held(self, tokens: int) -> int:
        """Return how many of ``tokens`` tokens it keeps."""
        return tokens if self.window is None else min(tokens, self.window)

    def own_and_shared(self, tokens: int, shared_tokens: int) -> tuple[int, int]:
        """Return the tokens that each row stores for itself, and those that all rows store once.

        What rows share of a window is stored until the last of it has left.
        """
        width = tokens if self.window is None else self.window
        own = min(width, tokens - shared_tokens)
        return own, min(width, shared_tokens) if own < width else 0


def _layers(config: PreTrainedConfig, dtype: torch.dtype) -> list[_Layer]:
    """Return the layers that keep keys and values."""
    specs = attention_layers(config, "a prefix cache", DYNAMIC_KINDS)
    widths = key_value_widths(config)
    return [_Layer(spec.window, width * dtype.itemsize) for spec, width in zip(specs, widths, strict=True) if width]


def _quantized_bytes(
    config: PreTrainedConfig, nbits: int, *, tokens: int, batch_size: int, dtype: torch.dtype, shared_tokens: int = 0
) -> int:
    """Return the bytes of a cache that quantizes what rows share, or all where they share nothing.

    The first and last of the quantized tokens of every layer stay exact.
    """
    options = inspect.signature(PrefixQuantizedCache).parameters
    first, residual = (options[name].default for name in ("exact_first", "residual_length"))
    rows, total = 1 if shared_tokens else batch_size, 0.0
    for layer in _layers(config, dtype):
        own, due = layer.own_and_shared(tokens, shared_tokens)
        if not shared_tokens:
            own, due = 0, own
        few = min(-(-max(0, due - first - residual) // _GROUP), max(0, due - first) // _GROUP)
        exact = due - few * _GROUP + few * _GROUP * _BITS[nbits] / (8 * dtype.itemsize)
        total += (exact * rows + own * batch_size) * layer.token_bytes
    return math.ceil(total)


def choose_strategy(
    model: PreTrainedModel,
    *,
    tokens: int | None = None,
    batch_size: int = 1,
    shared_tokens: int = 0,
    compiles: bool | None = None,
    memory_budget: int | None = None,
) -> StrategyChoice:
    """Choose a cache strategy for ``model`` where it is now.

    The choice is exact unless a budget is given that no exact strategy keeps to: then it is ``prefix-quantized``, in
    as many bits as the budget allows.

    Args:
        model: The model.
        tokens: Tokens per row at most, prompt and new ones; by default as many as the model can take.
        batch_size: Rows.
        shared_tokens: Tokens that all rows begin with.
        compiles: Whether decode steps are compiled; by default as Transformers decides, which is not on a CPU.
        memory_budget: Bytes that keys and values may take on the model's device, where that is less than is free.

    Returns:
        The choice, with its reasons and what the others would take.

    Raises:
        UnsupportedLayerError: The model has layers that no strategy holds exactly.
        CacheCapacityError: No strategy fits the free memory or the budget.
        InputMismatchError: Fewer than one token, row or byte, or more shared tokens than tokens.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=640, **sizes))
        >>> choose_strategy(model).strategy
        'prefix-dynamic'
        >>> choose_strategy(model, tokens=640, memory_budget=30_000).options
        {'nbits': 8}
    """
    if batch_size < 1 or (tokens is not None and tokens < 1):
        raise InputMismatchError(
            f"tokens is {tokens} and batch_size {batch_size}; both are 1 or more, or tokens is left out"
        )
    if memory_budget is not None and memory_budget < 1:
        raise InputMismatchError(f"memory_budget is {memory_budget}; it is a number of bytes, 1 or more")
    limit = getattr(decoder_config(model.config), "max_position_embeddings", None)
    length, device = tokens or limit or 4096, input_device(model)
    if not 0 <= shared_tokens <= length:
        raise InputMismatchError(f"shared_tokens is {shared_tokens}; it is from 0 to tokens, which is {length}")
    sizes: dict[str, Any] = {"tokens": length, "batch_size": batch_size, "dtype": model.dtype}
    sizes["shared_tokens"] = shared_tokens if batch_size > 1 else 0
    predictions = predicted_bytes(model.config, device=device, **sizes)
    if not sharing_gate(model, batch_size, shared_tokens).is_open:  # then `generate` copies it for every row
        predictions["prefix-dynamic"] = cache_bytes(
            model.config, tokens=length, batch_size=batch_size, dtype=model.dtype
        )
    needed, free = predictions["prefix-dynamic"], free_bytes(device)
    allowed = free if memory_budget is None else min(free, memory_budget)
    size = f"{batch_size} x {length} tokens take {needed / 1e6:.1f} MB, {free / 1e6:.0f} MB are free on {device}"
    if memory_budget is not None:
        size += f", keys and values may take {memory_budget / 1e6:.1f} MB"
    if needed > allowed and (tokens is not None or memory_budget is not None):
        return _choose_small(model, predictions, sizes, allowed, free, size, memory_budget is not None)
    reason = _why_dynamic(model, tokens, device.type != "cpu" if compiles is None else compiles)
    if not reason and predictions["prefix-static"] > allowed:
        reason = f"static buffers would take {predictions['prefix-static'] / 1e6:.1f} MB, with what rows share in each"
    if reason:
        return StrategyChoice("prefix-dynamic", needed, free, (size, reason), predictions)
    why = f"decoding compiles for static shapes on {device.type}"
    return StrategyChoice("prefix-static", predictions["prefix-static"], free, (size, why), predictions)


def _choose_small(
    model: PreTrainedModel,
    predictions: dict[str, int],
    sizes: dict[str, Any],
    allowed: int,
    free: int,
    size: str,
    may_lose: bool,
) -> StrategyChoice:
    """Return what keeps to ``allowed`` bytes where keys and values as they are do not."""
    offloaded = predictions["prefix-offloaded"]
    host = free_bytes(torch.device("cpu"))
    if offloaded <= allowed and predictions["prefix-dynamic"] <= host:
        reasons = (size, f"host memory has {host / 1e6:.0f} MB free, and only two layers at a time are on the device")
        return StrategyChoice("prefix-offloaded", offloaded, free, reasons, predictions)
    may_lose = may_lose and all(spec.kind in QUANTIZED_KINDS for spec in layer_specs(model.config))
    few = {nbits: _quantized_bytes(model.config, nbits, **sizes) for nbits in sorted(_BITS)[::-1]}
    found = " or ".join(f"{count / 1e6:.1f} MB in {nbits} bits" for nbits, count in few.items())
    for nbits, count in few.items():
        if may_lose and count <= allowed:
            reasons = (size, f"no exact strategy fits, so that it is quantized to {nbits} bits: {_LOSS[nbits]}")
            options = {"nbits": nbits}
            return StrategyChoice(
                "prefix-quantized", count, free, reasons, {**predictions, "prefix-quantized": count}, options
            )
    remedy = "" if may_lose or few[4] > allowed else ", or name prefix-quantized, which is not exact"
    raise CacheCapacityError(
        f"{size}: no exact strategy fits, and quantized they take {found}; pass fewer rows or tokens{remedy}"
    )


def _why_dynamic(model: PreTrainedModel, tokens: int | None, compiles: bool) -> str:
    """Return why static shapes gain nothing, or an empty string."""
    if not compiles and input_device(model).type == "cpu":
        return "Transformers does not compile on the CPU, so static shapes gain nothing"
    if not compiles:
        return "decoding is not compiled, so static shapes gain nothing"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "the model is spread over devices, where static shapes do not compile"
    if any(spec.kind not in _ATTENTION_ONLY for spec in layer_specs(model.config)):
        return "the model has running states or layers of its own kind, which have no static shapes to gain from"
    if why_no_static_cache(model.config):
        return f"the model is wrong on static shapes: {why_no_static_cache(model.config)}"
    if not runs_on_static_caches(model):
        return "the model does not generate on static caches in this release of Transformers"
    if tokens is None:
        return "no length was given, so buffers of a fixed size would be guesswork"
    return ""


def free_bytes(device: torch.device) -> int:
    """Return the bytes free on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # comes with accelerate

    return int(psutil.virtual_memory().available)
