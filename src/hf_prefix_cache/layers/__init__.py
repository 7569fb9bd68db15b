"""One module per layer kind: capture, restore, fork and crop of what a layer holds."""

from .dynamic import PrefixDynamicLayer, PrefixDynamicSlidingWindowLayer
from .state import AttentionState, KeyValues
from .static import PrefixStaticLayer, PrefixStaticSlidingWindowLayer

__all__ = [
    "AttentionState",
    "KeyValues",
    "PrefixDynamicLayer",
    "PrefixDynamicSlidingWindowLayer",
    "PrefixStaticLayer",
    "PrefixStaticSlidingWindowLayer",
]
