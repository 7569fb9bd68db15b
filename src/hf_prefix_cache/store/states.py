"""What stored states of layers have in common, whatever their kind."""

from dataclasses import replace
from typing import Any

import torch

from ..layers import LayerState, RecurrentState

__all__ = ["copy_state", "copy_tensor"]


def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary, contiguous copy of ``tensor`` without a graph, also inside ``torch.inference_mode()``."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone(memory_format=torch.contiguous_format)


def copy_state(state: LayerState) -> LayerState:
    """Return ``state`` with tensors of their own, without spare room."""
    if not isinstance(state, RecurrentState):
        return _compacted(state)
    return replace(
        state,
        conv=tuple(None if tensor is None else copy_tensor(tensor) for tensor in state.conv),
        recurrent=tuple(None if tensor is None else copy_tensor(tensor) for tensor in state.recurrent),
        attention=None if state.attention is None else _compacted(state.attention),
    )


def _compacted(state: Any) -> Any:  # of the same kind as `state`
    with torch.inference_mode(False), torch.no_grad():
        return state.compact()
