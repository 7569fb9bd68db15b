"""How far the states of several layers can be cropped together."""

from bisect import bisect_left
from collections.abc import Sequence

from .recurrent import LayerState

__all__ = ["shortest_crop"]


def shortest_crop(states: Sequence[LayerState], length: int) -> int:
    """Return the shortest prefix, of at least one token, to which ``states`` after ``length`` tokens can be cropped.

    What can be cropped to some length can be cropped to all above: windows hold a run of tokens up to the last one.
    """
    lengths = range(1, length)
    return 1 + bisect_left(lengths, True, key=lambda shorter: all(state.can_crop_to(shorter) for state in states))
