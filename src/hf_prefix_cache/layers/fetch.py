"""Bringing what lives elsewhere to the device that computes, while another layer computes."""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Generic, TypeVar

import torch

from .quantized_run import QuantizedRun
from .state import KeyValues
from .tiers import Tier

__all__ = ["Fetch"]

_Part = TypeVar("_Part", KeyValues, QuantizedRun, KeyValues | QuantizedRun)


class Fetch(Generic[_Part]):
    """Segments on their way to a device.

    They go on a stream of their own where the device has streams, and are read by a thread where they lie in files,
    since copies from there hold up who asks for them.
    """

    def __init__(
        self, segments: Sequence[_Part], device: torch.device, stream: torch.cuda.Stream | None, tier: Tier
    ) -> None:
        self._device, self._stream, self._tier = device, stream, tier
        self._segments: tuple[_Part, ...] | Future[tuple[_Part, ...]]
        if tier.reader is None:
            self._segments = self._move(segments, torch.is_inference_mode_enabled())
        else:
            self._segments = tier.reader.submit(self._move, segments, torch.is_inference_mode_enabled())

    def take(self) -> tuple[_Part, ...]:
        """Return the segments on the device; what is queued there from now on waits for them."""
        segments = self._segments.result() if isinstance(self._segments, Future) else self._segments
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for segment in segments:
                for part in segment:
                    part.record_stream(current)  # their memory belongs to the other stream
        return segments

    def _move(self, segments: Sequence[_Part], in_inference_mode: bool) -> tuple[_Part, ...]:
        # Threads have a mode of their own.
        with torch.inference_mode(in_inference_mode), torch.cuda.stream(self._stream):
            moved = tuple(_moved(segment, self._device) for segment in segments)
        for segment in segments:
            self._tier.release(segment)
        return moved


def _moved(segment: _Part, device: torch.device) -> _Part:
    moved = [part.to(device, non_blocking=True) for part in segment]
    return segment.kept(moved) if isinstance(segment, QuantizedRun) else KeyValues(*moved)
