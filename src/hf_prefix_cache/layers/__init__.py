"""One module per layer kind: capture, restore, fork and crop of what a layer holds."""

from .dynamic import PrefixDynamicLayer, PrefixDynamicSlidingWindowLayer
from .kinds import DYNAMIC_KINDS, STATIC_KINDS
from .recurrent import LayerState, PrefixRecurrentLayer, RecurrentState
from .state import AttentionState, KeyValues
from .static import PrefixStaticLayer
from .static_window import PrefixStaticSlidingWindowLayer

__all__ = [
    "DYNAMIC_KINDS",
    "STATIC_KINDS",
    "AttentionState",
    "KeyValues",
    "LayerState",
    "PrefixDynamicLayer",
    "PrefixDynamicSlidingWindowLayer",
    "PrefixRecurrentLayer",
    "PrefixStaticLayer",
    "PrefixStaticSlidingWindowLayer",
    "RecurrentState",
]
