"""What one quantized layer holds at a moment, as an immutable value, and by how much it is off."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import torch

from ..quantization import QuantizationError, Scheme
from .quantized_run import QuantizedRun
from .recurrent import LayerState, RecurrentState
from .segments import Segments, compact, exact, quantize, runs_in, split
from .state import AttentionState, KeyValues

__all__ = ["QuantizedState", "bits_per_value", "quantization_error", "quantized", "scheme_of"]


@dataclass(frozen=True, eq=False)
class QuantizedState(AttentionState):
    """What a quantized layer holds: runs of quantized tokens among exact ones.

    Attributes:
        segments: Runs of tokens in order, exact ones and quantized ones.
        scheme: How the layer quantizes.
        home: The device that computes, where quantized runs live apart from it; None for where they are.
    """

    segments: Segments  # type: ignore[assignment]
    scheme: Scheme = field(kw_only=True)
    home: torch.device | None = field(default=None, kw_only=True)

    @property
    def is_sliceable(self) -> bool:
        """Whether any run of its tokens can be stored on its own: no, since groups stay whole."""
        return False

    @property
    def runs(self) -> list[QuantizedRun]:
        """The quantized runs."""
        return runs_in(self.segments)

    def compact(self) -> "QuantizedState":
        """Return the same state in storage of its own, without spare room; neighbours are joined."""
        return replace(self, segments=compact(self.segments))

    def row(self, index: int, start: int, stop: int) -> "QuantizedState":
        """Return row ``index`` without the tokens (its padding) from ``start`` to ``stop``; views."""
        before, rest = split(self.segments, start - self.first)
        _, after = split(rest, stop - max(start, self.first))
        segments = tuple(
            KeyValues(*(part[index : index + 1] if segment.rows > 1 else part for part in segment))
            if isinstance(segment, KeyValues)
            else segment.row(index)
            for segment in (*before, *after)
        )
        return replace(self, segments=segments, length=self.length - (stop - start))

    def to(self, device: torch.device | str) -> "QuantizedState":
        """Return the state with its tensors on ``device``; runs that live apart from it stay where they are."""
        home = None if self.home is None else torch.device(device)
        return replace(
            self,
            segments=tuple(
                (segment.to(device) if home is None else segment)
                if isinstance(segment, QuantizedRun)
                else KeyValues(segment.keys.to(device), segment.values.to(device))
                for segment in self.segments
            ),
            home=home,
        )

    def exact(self) -> AttentionState:
        """Return what the quantized tokens stand for, as any other strategy can hold it."""
        home = self.home
        segments = (
            self.segments
            if home is None
            else tuple(segment.to(home) if isinstance(segment, QuantizedRun) else segment for segment in self.segments)
        )
        return AttentionState(exact(segments), self.length, self.window)

    def quantized(self) -> "QuantizedState":
        """Return the state with exact tokens quantized too, but for the first ones and the residual."""
        return replace(self, segments=quantize(self.segments, self.first, self.scheme))


def quantized(state: LayerState) -> LayerState:
    """Return the state of a quantized layer with exact tokens quantized too, as far as they are due; others as is."""
    if isinstance(state, RecurrentState) and isinstance(state.attention, QuantizedState):
        return replace(state, attention=state.attention.quantized())
    return state.quantized() if isinstance(state, QuantizedState) else state


def scheme_of(states: Iterable[LayerState]) -> Scheme | None:
    """Return how ``states`` are quantized, or None where none of them is of a quantized layer."""
    held = (state.attention if isinstance(state, RecurrentState) else state for state in states)
    return next((state.scheme for state in held if isinstance(state, QuantizedState)), None)


def quantization_error(states: Iterable[LayerState]) -> QuantizationError:
    """Return the error that was measured when what ``states`` hold was quantized."""
    errors: tuple[list[float], list[float]] = ([], [])
    for state in states:
        squares = [run.squares for run in _runs_of(state)]
        total = torch.stack(squares).sum(0).tolist() if squares else [[0.0, 1.0], [0.0, 1.0]]
        for side, (difference, norm) in zip(errors, total, strict=True):
            side.append(math.sqrt(difference / norm) if norm else 0.0)
    return QuantizationError(keys=tuple(errors[0]), values=tuple(errors[1]))


def bits_per_value(states: Iterable[LayerState]) -> float:
    """Return the bits of a quantized key or value, scales included; 0 where nothing is quantized."""
    runs = [run for state in states for run in _runs_of(state)]
    size = sum(part.numel() * part.element_size() for run in runs for part in run)
    values = sum(
        run.rows * run.groups * run.scheme.group_tokens * packed[0].shape[1] * head_dim
        for run in runs
        for packed, head_dim in zip((run.keys, run.values), run.head_dims, strict=True)
    )
    return 8 * size / values if values else 0.0


def _runs_of(state: LayerState) -> list[QuantizedRun]:
    held = state.attention if isinstance(state, RecurrentState) else state
    return held.runs if isinstance(held, QuantizedState) else []
