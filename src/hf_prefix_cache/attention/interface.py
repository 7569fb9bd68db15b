"""The way into Transformers: its ``sdpa`` attention, extended to keys that come with a shared part."""

import threading
from collections.abc import Callable
from typing import Any

import torch

from ..layers.deferred import SharedPart, attached
from ..layers.state import KeyValues
from .shared import shared_prefix_attention

__all__ = ["install", "uninstall"]

# What some models pass to attention beyond a mask; any of it takes the ordinary path.
_EXTRAS = ("softcap", "s_aux", "position_bias", "sliding_window")
_VISIBLE = "_hf_prefix_cache_visible"

_lock = threading.Lock()
_original: list[Callable[..., Any]] = []


def install() -> None:
    """Extend Transformers' ``sdpa`` attention. Keys without a shared part go through it untouched.

    No setting of any model is changed, so calls on one model from several threads do not see each other.
    """
    from transformers import AttentionInterface  # not at import: it takes seconds

    with _lock:
        if not _original:
            _original.append(AttentionInterface()["sdpa"])
            AttentionInterface.register("sdpa", _attention)


def uninstall() -> None:
    """Take back what `install` did."""
    from transformers import AttentionInterface

    with _lock:
        if _original:
            AttentionInterface.register("sdpa", _original.pop())


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    part = attached(key)
    if part is None:
        return _original[0](module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    own = KeyValues(key, value)
    mask = None if attention_mask is None else attention_mask[..., part.tokens :]
    is_plain = dropout == 0 and all(kwargs.get(name) is None for name in _EXTRAS)
    if not is_plain or not _sees_all(attention_mask, part.tokens) or (mask is None and query.shape[2] > 1):
        keys, values = _gathered(part, own, query.shape[0])
        return _original[0](module, query, keys, values, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = shared_prefix_attention(query, part.segments, own, _additive(mask, query.dtype), scale)
    return output.transpose(1, 2).contiguous(), None


def _gathered(part: SharedPart, own: KeyValues, rows: int) -> KeyValues:
    segments = (*part.segments, own)
    return KeyValues(
        torch.cat([segment.keys.expand(rows, -1, -1, -1) for segment in segments], dim=-2),
        torch.cat([segment.values.expand(rows, -1, -1, -1) for segment in segments], dim=-2),
    )


def _sees_all(mask: torch.Tensor | None, tokens: int) -> bool:
    """Return whether every query sees the first ``tokens`` keys; asked once for a mask that all layers share."""
    if mask is None:
        return True
    # A caller's mask may come again, changed in place; inference tensors do not count their changes.
    asked = tokens, None if mask.is_inference() else mask._version
    known: tuple[object, bool] | None = getattr(mask, _VISIBLE, None)
    if known is None or known[0] != asked:
        prefix = mask[..., :tokens]
        known = asked, bool((prefix if prefix.dtype == torch.bool else prefix == 0).all())
        setattr(mask, _VISIBLE, known)
    return known[1]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Return ``mask`` in numbers, the lowest where it hides: a query that sees no own token has a log-sum-exp, too."""
    if mask is None:
        return None
    lowest = torch.finfo(dtype).min
    if mask.dtype != torch.bool:
        return mask.clamp_min(lowest)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, lowest)
