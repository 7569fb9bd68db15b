"""What stored states of layers have in common, whatever their kind."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

import torch

from ..layers import AttentionState, LayerState

__all__ = ["copy_state", "copy_tensor", "shortest_crop"]


def copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary, contiguous copy of ``tensor`` without a graph, also inside ``torch.inference_mode()``."""
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone(memory_format=torch.contiguous_format)


def copy_state(state: LayerState) -> LayerState:
    """Return ``state`` with tensors of their own, without spare room."""
    if isinstance(state, AttentionState):
        return _copy_attention(state)
    return replace(
        state,
        conv=tuple(None if tensor is None else copy_tensor(tensor) for tensor in state.conv),
        recurrent=tuple(None if tensor is None else copy_tensor(tensor) for tensor in state.recurrent),
        attention=None if state.attention is None else _copy_attention(state.attention),
    )


def shortest_crop(states: Sequence[LayerState], length: int) -> int:
    """Return the shortest prefix, of at least one token, to which ``states`` after ``length`` tokens can be cropped.

    What can be cropped to some length can be cropped to all above: windows hold a run of tokens up to the last one.
    """
    lengths = range(1, length)
    return 1 + bisect_left(lengths, True, key=lambda shorter: all(state.can_crop_to(shorter) for state in states))


def _copy_attention(state: AttentionState) -> AttentionState:
    with torch.inference_mode(False), torch.no_grad():
        return state.compact()
