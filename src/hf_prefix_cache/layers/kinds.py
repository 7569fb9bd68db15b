"""Which layer class holds which of Transformers' layer types, for caches that grow and for caches of fixed size."""

from collections.abc import Callable
from typing import Any

from ..compat import LayerSpec
from .dynamic import PrefixDynamicLayer, PrefixDynamicSlidingWindowLayer
from .hybrid import (
    PrefixHybridLayer,
    PrefixHybridSlidingWindowLayer,
    PrefixStaticHybridLayer,
    PrefixStaticHybridSlidingWindowLayer,
)
from .recurrent import PrefixRecurrentLayer
from .static import PrefixStaticLayer
from .static_window import PrefixStaticSlidingWindowLayer

__all__ = ["DYNAMIC_KINDS", "STATIC_KINDS"]


def _window(spec: LayerSpec) -> int:
    return int(spec.window or 0)


DYNAMIC_KINDS: dict[str, Callable[[LayerSpec], Any]] = {
    "full_attention": lambda spec: PrefixDynamicLayer(),
    "sliding_attention": lambda spec: PrefixDynamicSlidingWindowLayer(_window(spec)),
    "chunked_attention": lambda spec: PrefixDynamicSlidingWindowLayer(_window(spec)),
    "conv": lambda spec: PrefixRecurrentLayer(spec.states),
    "linear_attention": lambda spec: PrefixRecurrentLayer(spec.states),
    "hybrid": lambda spec: PrefixHybridLayer(spec.states),
    "hybrid_sliding": lambda spec: PrefixHybridSlidingWindowLayer(_window(spec), spec.states),
}
"""Makes a layer that grows."""

STATIC_KINDS: dict[str, Callable[[LayerSpec, int], Any]] = {
    "full_attention": lambda spec, length: PrefixStaticLayer(max_cache_len=length),
    "sliding_attention": lambda spec, length: PrefixStaticSlidingWindowLayer(length, _window(spec)),
    "chunked_attention": lambda spec, length: PrefixStaticSlidingWindowLayer(length, _window(spec)),
    "conv": lambda spec, length: PrefixRecurrentLayer(spec.states),
    "linear_attention": lambda spec, length: PrefixRecurrentLayer(spec.states),
    "hybrid": lambda spec, length: PrefixStaticHybridLayer(length, spec.states),
    "hybrid_sliding": lambda spec, length: PrefixStaticHybridSlidingWindowLayer(length, _window(spec), spec.states),
}
"""Makes a layer of fixed size; the second argument is ``max_cache_len``."""
