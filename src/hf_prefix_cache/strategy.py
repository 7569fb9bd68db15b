"""Which cache for which model, device and memory, and why."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from .caches import PrefixQuantizedCache
from .caches.base import attention_layers
from .compat import decoder_config, layer_specs, runs_on_static_caches
from .exceptions import CacheCapacityError, InputMismatchError
from .layers import DYNAMIC_KINDS
from .weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["StrategyChoice", "cache_bytes", "choose_strategy", "predicted_bytes"]

_STATE_ONLY = ("conv", "linear_attention")
_ATTENTION_ONLY = ("full_attention", "sliding_attention", "chunked_attention")


# Bits of a quantized key or value, scales included, in the backend's default groups.
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
    held = [tokens if window is None else min(tokens, window) for window in _windows(config)]
    return sum(held) * batch_size * _token_bytes(config, dtype)


def predicted_bytes(
    config: PreTrainedConfig, *, tokens: int, batch_size: int, dtype: torch.dtype, device: torch.device
) -> dict[str, int]:
    """Return the bytes that each strategy holds on ``device``; ``prefix-quantized`` with 4 bits for every token."""
    exact = cache_bytes(config, tokens=tokens, batch_size=batch_size, dtype=dtype)
    windows, token = _windows(config), batch_size * _token_bytes(config, dtype)
    # Of layers in host memory two are on the device at a time: one that computes, and the next on its way.
    apart = sum(min(tokens, window) for window in windows if window is not None) + 2 * tokens * (None in windows)
    return {
        "prefix-dynamic": exact,
        "prefix-static": exact,
        "prefix-offloaded": exact if device.type == "cpu" else min(exact, apart * token),
        "prefix-quantized": _quantized_bytes(config, 4, tokens, batch_size, dtype),
    }


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """Return the window of each layer that attends, None where it has none."""
    specs = attention_layers(config, "a prefix cache", DYNAMIC_KINDS)
    return [spec.window for spec in specs if spec.kind not in _STATE_ONLY]


def _token_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the key and the value of one token in one layer."""
    decoder = decoder_config(config)
    if not _windows(config):
        return 0
    latent = getattr(decoder, "kv_lora_rank", None)
    if latent:  # latent attention holds what keys and values are made of, and rotary keys for all heads
        return (int(latent) + int(decoder.qk_rope_head_dim)) * dtype.itemsize
    heads = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
    head_dim = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    return 2 * int(heads) * int(head_dim) * dtype.itemsize


def _quantized_bytes(config: PreTrainedConfig, nbits: int, tokens: int, batch_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of a cache that quantizes all but the first and last tokens of every layer."""
    options = inspect.signature(PrefixQuantizedCache).parameters
    always = options["exact_first"].default + options["residual_length"].default
    held = [tokens if window is None else min(tokens, window) for window in _windows(config)]
    exact = sum(min(always, count) for count in held)
    few = (sum(held) - exact) * _BITS[nbits] / (8 * dtype.itemsize)
    return math.ceil((exact + few) * batch_size * _token_bytes(config, dtype))


def choose_strategy(
    model: PreTrainedModel, *, tokens: int | None = None, batch_size: int = 1, memory_budget: int | None = None
) -> StrategyChoice:
    """Choose a cache strategy for ``model`` where it is now.

    The choice is exact unless a budget is given that no exact strategy keeps to: then it is ``prefix-quantized``, in
    as many bits as the budget allows.

    Args:
        model: The model.
        tokens: Tokens per row at most, prompt and new ones; by default as many as the model can take.
        batch_size: Rows.
        memory_budget: Bytes that keys and values may take on the model's device, where that is less than is free.

    Returns:
        The choice, with its reasons and what the others would take.

    Raises:
        UnsupportedLayerError: The model has layers that no strategy holds exactly.
        CacheCapacityError: No strategy fits the free memory or the budget.
        InputMismatchError: Fewer than one token, row or byte.

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
    predictions = predicted_bytes(model.config, tokens=length, batch_size=batch_size, dtype=model.dtype, device=device)
    needed, free = predictions["prefix-dynamic"], free_bytes(device)
    allowed = free if memory_budget is None else min(free, memory_budget)
    size = f"{batch_size} x {length} tokens take {needed / 1e6:.1f} MB, {free / 1e6:.0f} MB are free on {device}"
    if memory_budget is not None:
        size += f", the budget is {memory_budget / 1e6:.1f} MB"
    if needed > allowed and (tokens is not None or memory_budget is not None):
        return _choose_small(model, predictions, length, batch_size, allowed, free, size, memory_budget is not None)
    reason = _why_dynamic(model, tokens)
    if reason:
        return StrategyChoice("prefix-dynamic", needed, free, (size, reason), predictions)
    compiles = f"decoding compiles for static shapes on {device.type}"
    return StrategyChoice("prefix-static", needed, free, (size, compiles), predictions)


def _choose_small(
    model: PreTrainedModel,
    predictions: dict[str, int],
    tokens: int,
    batch_size: int,
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
    few = {
        nbits: _quantized_bytes(model.config, nbits, tokens, batch_size, model.dtype) for nbits in sorted(_BITS)[::-1]
    }
    sizes = " or ".join(f"{count / 1e6:.1f} MB in {nbits} bits" for nbits, count in few.items())
    for nbits, count in few.items():
        if may_lose and count <= allowed:
            reasons = (size, f"no exact strategy fits, so that it is quantized to {nbits} bits: {_LOSS[nbits]}")
            options = {"nbits": nbits}
            return StrategyChoice(
                "prefix-quantized", count, free, reasons, {**predictions, "prefix-quantized": count}, options
            )
    remedy = "" if may_lose or few[4] > allowed else ", or name prefix-quantized, which is not exact"
    raise CacheCapacityError(
        f"{size}: no exact strategy fits, and quantized they take {sizes}; pass fewer rows or tokens{remedy}"
    )


def _why_dynamic(model: PreTrainedModel, tokens: int | None) -> str:
    """Return why static shapes gain nothing, or an empty string."""
    if input_device(model).type == "cpu":
        return "Transformers does not compile on the CPU, so static shapes gain nothing"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "the model is spread over devices, where static shapes do not compile"
    if any(spec.kind not in _ATTENTION_ONLY for spec in layer_specs(model.config)):
        return "the model has running states, which have no static shapes to gain from"
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
