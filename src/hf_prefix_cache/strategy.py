"""Which cache for which model, device and memory, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

from .caches.base import attention_layers
from .compat import decoder_config, layer_specs
from .exceptions import CacheCapacityError, InputMismatchError
from .layers import DYNAMIC_KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["StrategyChoice", "cache_bytes", "choose_strategy"]

_STATE_ONLY = ("conv", "linear_attention")
_ATTENTION_ONLY = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True)
class StrategyChoice:
    """A strategy with what it will take and why it was chosen.

    Attributes:
        strategy: Its name.
        predicted_bytes: Bytes of keys and values that it will hold.
        free_bytes: Bytes free on the model's device when it was chosen.
        reasons: Why, in words.

    Example:
        >>> print(StrategyChoice("prefix-dynamic", 2_000_000, 8_000_000_000, ("it runs on the CPU",)))
        prefix-dynamic (2.0 MB): it runs on the CPU
    """

    strategy: str
    predicted_bytes: int
    free_bytes: int
    reasons: tuple[str, ...]

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
    decoder = decoder_config(config)
    specs = [
        spec for spec in attention_layers(config, "a prefix cache", DYNAMIC_KINDS) if spec.kind not in _STATE_ONLY
    ]
    if not specs:
        return 0
    heads = getattr(decoder, "num_key_value_heads", None) or decoder.num_attention_heads
    head_dim = getattr(decoder, "head_dim", None) or decoder.hidden_size // decoder.num_attention_heads
    held = sum(tokens if spec.window is None else min(tokens, spec.window) for spec in specs)
    return 2 * held * batch_size * heads * head_dim * dtype.itemsize


def choose_strategy(model: PreTrainedModel, *, tokens: int | None = None, batch_size: int = 1) -> StrategyChoice:
    """Choose a cache strategy for ``model`` where it is now.

    Args:
        model: The model.
        tokens: Tokens per row at most, prompt and new ones; by default as many as the model can take.
        batch_size: Rows.

    Returns:
        The choice, with its reasons.

    Raises:
        UnsupportedLayerError: The model has layers that no strategy holds exactly.
        CacheCapacityError: No strategy fits the free memory.
        InputMismatchError: Fewer than one token or row.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=64, **sizes))
        >>> choose_strategy(model).strategy
        'prefix-dynamic'
    """
    if batch_size < 1 or (tokens is not None and tokens < 1):
        raise InputMismatchError(
            f"tokens is {tokens} and batch_size {batch_size}; both are 1 or more, or tokens is left out"
        )
    limit = getattr(decoder_config(model.config), "max_position_embeddings", None)
    length = tokens or limit or 4096
    needed = cache_bytes(model.config, tokens=length, batch_size=batch_size, dtype=model.dtype)
    free = free_bytes(model.device)
    size = f"{batch_size} x {length} tokens take {needed / 1e6:.1f} MB, {free / 1e6:.0f} MB are free on {model.device}"
    if tokens is not None and needed > free:
        raise CacheCapacityError(f"{size}: no strategy of this release fits; pass fewer rows or tokens")
    reason = _why_dynamic(model, tokens)
    if reason:
        return StrategyChoice("prefix-dynamic", needed, free, (size, reason))
    compiles = f"decoding compiles for static shapes on {model.device.type}"
    return StrategyChoice("prefix-static", needed, free, (size, compiles))


def _why_dynamic(model: PreTrainedModel, tokens: int | None) -> str:
    """Return why static shapes gain nothing, or an empty string."""
    if model.device.type == "cpu":
        return "Transformers does not compile on the CPU, so static shapes gain nothing"
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        return "the model is spread over devices, where static shapes do not compile"
    if any(spec.kind not in _ATTENTION_ONLY for spec in layer_specs(model.config)):
        return "the model has running states, which have no static shapes to gain from"
    if tokens is None:
        return "no length was given, so buffers of a fixed size would be guesswork"
    return ""


def free_bytes(device: torch.device) -> int:
    """Return the bytes free on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    import psutil  # comes with accelerate

    return int(psutil.virtual_memory().available)
