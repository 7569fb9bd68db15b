"""What a layer of one strategy holds, as a layer of any other can hold it."""

from dataclasses import replace

from .offloaded import OffloadedState
from .quantized_state import QuantizedState
from .recurrent import LayerState, RecurrentState
from .state import AttentionState

__all__ = ["portable"]


def portable(state: LayerState) -> LayerState:
    """Return ``state`` as keys and values on the device that computes with them; itself where it is that already."""
    if isinstance(state, RecurrentState):
        return state if state.attention is None else replace(state, attention=_portable(state.attention))
    return _portable(state) if isinstance(state, AttentionState) else state


def _portable(state: AttentionState) -> AttentionState:
    return state.exact() if isinstance(state, QuantizedState | OffloadedState) else state
