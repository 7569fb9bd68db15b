"""Which cache a call of ``generate`` gets, and what ``cache_config`` may say about it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from ..caches import PrefixCache, PrefixDynamicCache, PrefixOffloadedCache, PrefixQuantizedCache

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["CACHE_OPTIONS", "growing_cache", "single_cache"]

CACHE_OPTIONS: dict[str, tuple[str, ...]] = {
    kind.strategy: tuple(name for name in inspect.signature(kind).parameters if name != "config")
    for kind in (PrefixQuantizedCache, PrefixOffloadedCache)
}
"""Options of strategies that ``cache_config`` may hold beside those of all."""


def growing_cache(strategy: str, config: PreTrainedConfig, options: dict[str, Any]) -> PrefixCache:
    """Return the cache of a call, for any strategy but ``prefix-static``.

    Of what a quantized call holds, only the shared prefix is quantized, unless ``quantize_own`` says otherwise.
    """
    if strategy == "prefix-quantized":
        return PrefixQuantizedCache(config=config, **{"quantize_own": False, **options})
    if strategy == "prefix-offloaded":
        return PrefixOffloadedCache(config=config, **options)
    return PrefixDynamicCache(config=config)


def single_cache(strategy: str, config: PreTrainedConfig, options: dict[str, Any]) -> PrefixCache:
    """Return a cache to compute a prefix in that calls of ``strategy`` start from."""
    own = {"quantize_own": True} if strategy == "prefix-quantized" else {}
    return growing_cache(strategy, config, {**options, **own})
