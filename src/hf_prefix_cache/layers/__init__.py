"""One module per layer kind: capture, restore, fork and crop of what a layer holds."""

from .dynamic import PrefixDynamicLayer, PrefixDynamicSlidingWindowLayer
from .kept import KeptLayer, KeptState
from .kinds import DYNAMIC_KINDS, STATIC_KINDS, forget_layer_kind, register_layer_kind
from .nothing import NothingState
from .recurrent import LayerState, PrefixRecurrentLayer, RecurrentState
from .state import AttentionState, KeyValues
from .static import PrefixStaticLayer
from .static_window import PrefixStaticSlidingWindowLayer

__all__ = [
    "DYNAMIC_KINDS",
    "STATIC_KINDS",
    "AttentionState",
    "KeptLayer",
    "KeptState",
    "KeyValues",
    "LayerState",
    "NothingState",
    "PrefixDynamicLayer",
    "PrefixDynamicSlidingWindowLayer",
    "PrefixRecurrentLayer",
    "PrefixStaticLayer",
    "PrefixStaticSlidingWindowLayer",
    "RecurrentState",
    "forget_layer_kind",
    "register_layer_kind",
]
