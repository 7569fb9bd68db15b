"""Full attention whose keys and values live apart from the device that computes, and come to it for their layer."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .dynamic import PrefixDynamicLayer
from .fetch import Fetch
from .growing import GrowingKeyValues
from .hybrid import HybridLayer
from .recurrent import PrefixRecurrentLayer
from .scratch import Scratch
from .segments import join
from .state import AttentionState, KeyValues
from .tiers import Tier, room_for

__all__ = ["OffloadedState", "PrefixOffloadedHybridLayer", "PrefixOffloadedLayer"]

_HOST = torch.device("cpu")
# Own tokens go to a file when there are this many, and this part of all: few and long runs, and little in memory.
_FEWEST, _SHARE = 64, 32


@dataclass(frozen=True, eq=False)
class OffloadedState(AttentionState):
    """Keys and values in host memory, or in files that are mapped into it.

    Attributes:
        home: The device that computes with them.
    """

    home: torch.device = field(kw_only=True)

    def to(self, device: torch.device | str) -> "OffloadedState":
        """Return the state for a layer on ``device``; it stays where it is."""
        return replace(self, home=torch.device(device))

    def exact(self) -> AttentionState:
        """Return the state on its device, as any other strategy can hold it."""
        return AttentionState(self.segments, self.length, self.window).to(self.home)


class HostKeyValues(GrowingKeyValues):
    """Own tokens in host memory, pinned where CUDA is, so that copies to a device do not hold up the host."""

    def _allocate(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        return like.new_empty(shape, pin_memory=torch.cuda.is_available())


class PrefixOffloadedLayer(PrefixDynamicLayer):
    """A full-attention layer in host memory or in files.

    Where the host computes and its memory holds the tokens, that is where attention wants them, and the layer is a
    `PrefixDynamicLayer`.

    Args:
        tier: Where the tokens live; own tokens stay in host memory until there are enough for a file.
        scratch: Memory to gather into, shared by the layers of a cache.
    """

    def __init__(self, tier: Tier, scratch: Scratch) -> None:
        PrefixDynamicLayer.__init__(self)
        self.home = _HOST  # the device that computes
        self._tier, self._scratch = tier, scratch
        self._fetch: Fetch[KeyValues] | None = None

    @property
    def is_apart(self) -> bool:
        """Whether the device that computes has a memory of its own."""
        return self.home.type != _HOST.type

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens ``[rows, heads, tokens, head_dim]`` and return all that their queries may attend to.

        Returns:
            Keys and values, perhaps in memory that the next layer gathers into if nobody holds them by then.

        Raises:
            BatchSizeError: The rows differ from those held.
            OffloadError: A file was not written; nothing was added.
        """
        if self.home != key_states.device:
            self.home, self._fetch = key_states.device, None
        if not self.is_apart and not self._tier.is_file:
            return super().update(key_states, value_states, *args, **kwargs)
        self._check_continued_by(key_states, value_states)
        new = KeyValues(key_states, value_states)
        held = self._present()
        result = self._joined((*held, new), new.rows)
        self._add(KeyValues(*(part.to(_HOST) for part in new)))
        self._rows, self._length = new.rows, self._length + new.tokens
        return result.keys, result.values

    def fetch(self, stream: torch.cuda.Stream | None) -> None:
        """Begin to bring what is held to the device, unless that has begun."""
        if not self._length:
            return
        if not self.is_apart:
            self._tier.prefetch(self.attention_state().tensors())
        elif self._fetch is None:
            self._fetch = Fetch(self.attention_state().segments, self.home, stream, self._tier)

    def bytes_due(self, tokens: int, new: KeyValues | None = None) -> int:
        """Return the bytes of files that `update` with ``tokens`` tokens, such as ``new``, takes."""
        held = self.attention_state().segments
        sample = held[-1] if held else new
        count = tokens + (0 if self._own is None else self._own.tokens)
        if not self._tier.is_file or sample is None or not self._is_due(count, self._length + tokens):
            return 0
        return room_for(count * (self._rows or sample.rows) * sample.bytes_per_token + 64)

    def bytes_to_load(self, state: AttentionState) -> int:
        """Return the bytes of files that `load` of ``state`` takes."""
        due = [part for part in state.segments if self._is_due(part.tokens, state.length)]
        return sum(room_for(part.nbytes + 64) for part in due if self._tier.is_file and not self._tier.holds(part))

    def load(self, state: AttentionState, rows: int) -> None:
        """Hold ``state`` for a batch of ``rows``: shared where it lies there already, copied where it does not.

        Raises:
            OffloadError: A file was not written.
        """
        self.reset()
        if not state.length:
            return
        home = state.home if isinstance(state, OffloadedState) else state.segments[-1].keys.device
        segments = tuple(self._kept(segment, state.length) for segment in state.segments)
        super().load(replace(state, segments=segments), rows)
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
        """Do nothing: sharing is what keeps memory small."""

    # -- inside ------------------------------------------------------------------------------------------------------

    def _present(self) -> tuple[KeyValues, ...]:
        """Return what is held, on the device that computes."""
        if not self.is_apart:
            return self.attention_state().segments
        self.fetch(None)
        held = () if self._fetch is None else self._fetch.take()
        self._fetch = None
        return held

    def _joined(self, segments: tuple[KeyValues, ...], rows: int) -> KeyValues:
        # What autograd saves for the backward pass must not be written over.
        if torch.is_grad_enabled() or len(segments) == 1 or len({part.keys.dtype for part in segments}) > 1:
            return join(segments, rows)
        tokens = sum(segment.tokens for segment in segments)
        keys, values = segments[-1]
        shapes = ((rows, part.shape[1], tokens, part.shape[3]) for part in (keys, values))
        out = self._scratch.take(*shapes, device=keys.device, dtype=keys.dtype)
        start = 0
        for segment in segments:
            target = out.slice(start, start + segment.tokens)
            target.keys.copy_(segment.keys)
            target.values.copy_(segment.values)
            start += segment.tokens
            self._tier.release(segment)
        return out

    def _add(self, new: KeyValues) -> None:
        own = 0 if self._own is None else self._own.tokens
        is_graph = new.keys.requires_grad or (self._own is not None and self._own.view().keys.requires_grad)
        if is_graph or not self._tier.is_file or not self._is_due(own + new.tokens, self._length + new.tokens):
            self._append(*new)
            return
        tokens = new if self._own is None or not own else join((self._own.view(), new), new.rows)
        kept = KeyValues(*self._tier.keep(tokens))
        self._shared, self._own = (*self._shared, kept), None

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> GrowingKeyValues:
        if self._own is None:
            self._own = HostKeyValues(key_states[..., :0, :], value_states[..., :0, :])
        return super()._append(key_states, value_states)

    def _kept(self, segment: KeyValues, length: int) -> KeyValues:
        """Return ``segment`` where it is to live: in host memory where it is too short for a file."""
        if self._tier.is_file and (segment.keys.requires_grad or not self._is_due(segment.tokens, length)):
            return KeyValues(*(part.to(_HOST) for part in segment))
        return KeyValues(*self._tier.keep(segment))

    @staticmethod
    def _is_due(own: int, length: int) -> bool:
        return own >= max(_FEWEST, length // _SHARE)


class PrefixOffloadedHybridLayer(HybridLayer, PrefixOffloadedLayer):  # type: ignore[misc]
    """A running state, which stays on the device, beside full attention that is offloaded."""

    is_compileable = False

    def __init__(self, tier: Tier, scratch: Scratch, number_of_states: int) -> None:
        PrefixOffloadedLayer.__init__(self, tier, scratch)
        PrefixRecurrentLayer.__init__(self, number_of_states)
