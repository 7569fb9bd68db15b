"""Full attention whose keys and values live in host memory, and come to the device while the layer runs."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .dynamic import PrefixDynamicLayer
from .growing import GrowingKeyValues
from .hybrid import HybridLayer
from .recurrent import PrefixRecurrentLayer
from .segments import join
from .state import AttentionState, KeyValues

__all__ = ["OffloadedState", "PrefixOffloadedHybridLayer", "PrefixOffloadedLayer"]

_HOST = torch.device("cpu")


@dataclass(frozen=True, eq=False)
class OffloadedState(AttentionState):
    """Keys and values in host memory.

    Attributes:
        home: The device that computes with them.
    """

    home: torch.device = field(kw_only=True)

    def to(self, device: torch.device | str) -> "OffloadedState":
        """Return the state for a layer on ``device``; it stays in host memory."""
        return replace(self, home=torch.device(device))

    def exact(self) -> AttentionState:
        """Return the state on its device, as any other strategy can hold it."""
        return AttentionState(self.segments, self.length, self.window).to(self.home)


class HostKeyValues(GrowingKeyValues):
    """Own tokens in host memory, pinned where CUDA is, so that copies to a device do not hold up the host."""

    def _allocate(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return like.new_empty(shape, pin_memory=torch.cuda.is_available())


class Fetch:
    """Segments on their way from the host to a device, on a stream of their own where the device has streams."""

    def __init__(
        self, segments: tuple[KeyValues, ...], device: torch.device, stream: torch.cuda.Stream | None
    ) -> None:
        self._device, self._stream = device, stream
        if stream is None:
            self._segments = _moved(segments, device)
        else:
            with torch.cuda.stream(stream):
                self._segments = _moved(segments, device)

    def take(self) -> tuple[KeyValues, ...]:
        """Return the segments on the device; what is queued there from now on waits for them."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._stream)
            for segment in self._segments:
                for part in segment:
                    part.record_stream(current)  # their memory belongs to the other stream
        return self._segments


class PrefixOffloadedLayer(PrefixDynamicLayer):
    """A full-attention layer in host memory.

    Where the host computes, that is where attention wants it, and the layer is a `PrefixDynamicLayer`.
    """

    def __init__(self) -> None:
        PrefixDynamicLayer.__init__(self)
        self.home = _HOST  # the device that computes
        self._fetch: Fetch | None = None

    @property
    def is_apart(self) -> bool:
        """Whether the device that computes has a memory of its own."""
        return self.home.type != _HOST.type

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens ``[rows, heads, tokens, head_dim]`` and return all that their queries may attend to.

        Raises:
            BatchSizeError: The rows differ from those held.
        """
        if self.home != key_states.device:
            self.home, self._fetch = key_states.device, None
        if not self.is_apart:
            return super().update(key_states, value_states, *args, **kwargs)
        self._check_continued_by(key_states, value_states)
        self.fetch(None)
        held = () if self._fetch is None else self._fetch.take()
        self._fetch = None
        result = join((*held, KeyValues(key_states, value_states)), key_states.shape[0])
        self._append(key_states.to(_HOST), value_states.to(_HOST))
        self._length += key_states.shape[-2]
        return result.keys, result.values

    def fetch(self, stream: torch.cuda.Stream | None) -> None:
        """Begin to bring what is held to the device, unless that has begun."""
        if self._fetch is None and self._length and self.is_apart:
            self._fetch = Fetch(self.attention_state().segments, self.home, stream)

    def load(self, state: AttentionState, rows: int) -> None:
        """Hold ``state`` for a batch of ``rows``: shared where it is in host memory already, copied there if not."""
        self.reset()
        if not state.length:
            return
        home = state.home if isinstance(state, OffloadedState) else state.segments[-1].keys.device
        super().load(replace(state, segments=tuple(_to_host(segment) for segment in state.segments)), rows)
        self.home = home

    def attention_state(self) -> OffloadedState:
        """Return what is held as views, without freezing it: for questions, not for keeping."""
        state = super().attention_state()
        return OffloadedState(state.segments, state.length, self.window, home=self.home)

    def share(self) -> OffloadedState:
        """Return what is held; no later operation of this layer changes its bytes. No copy."""
        super().share()
        return self.attention_state()

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self._fetch = None
        super().crop_to(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was; tokens that all rows share are not touched."""
        self._fetch = None
        super().reorder_cache(beam_idx)

    def reset(self) -> None:
        """Forget everything."""
        self._fetch = None
        super().reset()

    def unshare(self) -> None:
        """Do nothing: sharing is what keeps host memory small."""

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        if self._own is None:
            self._own = HostKeyValues(key_states[..., :0, :], value_states[..., :0, :])
        super()._append(key_states, value_states)


class PrefixOffloadedHybridLayer(HybridLayer, PrefixOffloadedLayer):  # type: ignore[misc, override]
    """A running state, which stays on the device, beside full attention in host memory."""

    is_compileable = False

    def __init__(self, number_of_states: int) -> None:
        PrefixOffloadedLayer.__init__(self)
        PrefixRecurrentLayer.__init__(self, number_of_states)


def _moved(segments: tuple[KeyValues, ...], device: torch.device) -> tuple[KeyValues, ...]:
    return tuple(KeyValues(*(part.to(device, non_blocking=True) for part in segment)) for segment in segments)


def _to_host(segment: KeyValues) -> KeyValues:
    if segment.keys.device.type == _HOST.type:
        return segment
    return KeyValues(*(part.to(_HOST).pin_memory() for part in segment))
