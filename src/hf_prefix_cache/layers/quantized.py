"""Attention layers that hold most of their tokens in few bits: full attention, and sliding or chunked windows."""

from functools import reduce
from typing import Any

import torch

from ..exceptions import OffloadError
from ..quantization import Scheme
from .dynamic import PrefixDynamicLayer, PrefixDynamicSlidingWindowLayer
from .fetch import Fetch
from .growing import GrowingKeyValues
from .quantized_run import QuantizedRun, join_runs
from .quantized_state import QuantizedState
from .scratch import Scratch
from .segments import (
    Segment,
    Segments,
    after_runs,
    count_tokens,
    due_groups,
    exact,
    has_graph,
    join,
    own_copy,
    quantize,
    runs_in,
    split,
)
from .state import AttentionState, KeyValues
from .tiers import Tier, room_for

__all__ = ["PrefixQuantizedLayer", "PrefixQuantizedSlidingWindowLayer"]


class PrefixQuantizedLayer(PrefixDynamicLayer):
    """A full-attention layer that quantizes its tokens in groups: once, when a group is complete, and never again.

    The first tokens and the last ones stay exact. Quantized groups are never changed, so snapshots and forks share
    them. While the layer runs, all that it holds is decoded for attention; nothing decoded is kept.

    Tokens that are part of an autograd graph stay exact as well: gradients are those of exact tokens behind a
    constant prefix.

    Args:
        scheme: How it quantizes.
        scratch: Memory to decode into, shared by the layers of a cache.
        quantize_own: Whether tokens that are added are quantized, and not only those that are loaded.
        tier: Where quantized tokens live, apart from the device that computes; None for on it.
    """

    _shared: Segments  # type: ignore[assignment]

    def __init__(
        self, scheme: Scheme, scratch: Scratch, *, quantize_own: bool = True, tier: Tier | None = None
    ) -> None:
        PrefixDynamicLayer.__init__(self)
        self.scheme, self.quantize_own = scheme, quantize_own
        self._scratch, self._tier = scratch, tier
        self._own_runs = 0  # of the quantized runs, how many at the end nobody else holds
        self.home = torch.device("cpu")  # the device that computes
        self._fetch: Fetch[QuantizedRun] | None = None

    @property
    def is_apart(self) -> bool:
        """Whether quantized tokens live apart from the device that computes, in another memory."""
        return self._tier is not None and self.home.type != "cpu"

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember where and in which dtype the tokens live.

        Raises:
            UnsupportedModelError: A dtype or size of heads that is not quantized.
        """
        self.scheme.check(key_states, value_states)
        self.home = key_states.device
        super().lazy_initialization(key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens ``[rows, heads, tokens, head_dim]`` and return all that their queries may attend to.

        In the call that adds them, tokens are attended to as they are passed.

        Returns:
            Keys and values, perhaps in memory that the next layer decodes into if nobody holds them by then.

        Raises:
            BatchSizeError: The rows differ from those held.
            UnsupportedModelError: A dtype or size of heads that is not quantized.
            OffloadError: A file was not written; nothing was added.
        """
        self._check_continued_by(key_states, value_states)
        new = KeyValues(key_states, value_states)
        visible = self._visible(new.tokens)
        held = self.attention_state().segments
        segments = (*held, new)
        if self._is_due(segments):
            result = self._decode((*self._present(held), new), new.rows, visible)
            before = self._length, self._rows
            self._length, self._rows = self._length + new.tokens, new.rows
            try:
                self._hold(segments)
            except OffloadError:
                (self._length, self._rows), self._own_runs = before, 0
                raise
        else:
            self._append(key_states, value_states)
            self._length += new.tokens
            result = self._decode(self._present(self.attention_state().segments), new.rows, visible)
        return result.keys, result.values

    def check_load(self, state: AttentionState, rows: int) -> None:
        """Raise `UnsupportedModelError` for a dtype or size of heads that is not quantized."""
        for segment in state.segments:
            if isinstance(segment, KeyValues):
                self.scheme.check(*segment)

    def load(self, state: AttentionState, rows: int) -> None:
        """Hold ``state`` for a batch of ``rows``: shared where it is quantized already, quantized where it is not."""
        self.reset()
        if not state.length:
            return
        segments: Segments = state.segments
        if self.quantize_own or not isinstance(state, QuantizedState):
            segments = quantize(segments, state.first, self.scheme, self._longest_run)
        device = getattr(state, "home", None) or state.segments[-1].device
        self.lazy_initialization(*_like(segments[-1], device))
        if self._tier is None:
            segments = tuple(part.to(device) if isinstance(part, QuantizedRun) else part for part in segments)
        segments = self._kept(segments)
        self._shared, self._length, self._rows = segments, state.length, rows

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._own_runs, self._fetch = 0, None

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        self._fetch = None
        super().crop_to(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was; tokens that all rows share are not touched."""
        self._fetch, self._own_runs = None, 0
        super().reorder_cache(beam_idx)

    def fetch(self, stream: torch.cuda.Stream | None) -> None:
        """Begin to bring quantized tokens to the device that computes, unless that has begun."""
        runs = runs_in(self._shared)
        if self._tier is None or not runs:
            return
        if not self.is_apart:
            self._tier.prefetch(part for run in runs for part in run)
        elif self._fetch is None:
            self._fetch = Fetch(runs, self.home, stream, self._tier)

    def bytes_due(self, tokens: int, new: KeyValues | None = None) -> int:
        """Return the most bytes of files that `update` with ``tokens`` tokens, such as ``new``, takes."""
        held = self.attention_state().segments
        sample = held[-1] if held else new
        if self._tier is None or not self._tier.is_file or not self.quantize_own or sample is None:
            return 0
        count = count_tokens(after_runs(held)) + tokens
        if not due_groups(count, self._length + tokens - count, self.scheme):
            return 0
        rows = self._rows or sample.rows
        rejoined = runs_in(held)[len(runs_in(held)) - self._own_runs :]
        parts = [count * rows * sample.bytes_per_token, *(part.nbytes for part in rejoined)]
        return sum(room_for(part) for part in parts)

    def bytes_to_load(self, state: AttentionState) -> int:
        """Return the most bytes of files that `load` of ``state`` takes."""
        if self._tier is None or not self._tier.is_file:
            return 0
        return sum(room_for(part.nbytes) for part in state.segments if not self._tier.holds(part))

    def share(self) -> QuantizedState:
        """Return what is held; no later operation of this layer changes its bytes. No copy."""
        self._own_runs = 0
        super().share()
        return self.attention_state()

    def attention_state(self) -> QuantizedState:
        """Return what is held as views, without freezing it: for questions, not for keeping."""
        state = super().attention_state()
        home = None if self._tier is None else self.home
        return QuantizedState(state.segments, state.length, self.window, scheme=self.scheme, home=home)

    def unshare(self) -> None:
        """Do nothing: what is quantized is decoded at every step, shared or not."""

    # -- what a window changes ---------------------------------------------------------------------------------------

    _longest_run: int | None = None  # tokens of a quantized run at most, a multiple of a group

    def _visible(self, added: int) -> int | None:
        """Return how many tokens ``added`` new ones attend to, themselves included; None for all that are held."""
        return None

    def _retained(self, segments: Segments) -> Segments:
        """Return the part of ``segments``, which end with the last token seen, that is still needed."""
        return segments

    # -- inside ------------------------------------------------------------------------------------------------------

    def _is_due(self, segments: Segments) -> bool:
        """Return whether something is to be quantized, now that ``segments`` are held, the last of them being new."""
        tail = after_runs(self._retained(segments))
        if not self.quantize_own or has_graph(tail):
            return False
        tokens = count_tokens(tail)
        return due_groups(tokens, self._length + segments[-1].tokens - tokens, self.scheme) > 0

    def _hold(self, segments: Segments) -> None:
        """Hold ``segments`` up to the last token seen, quantizing what is due."""
        segments = self._retained(segments)
        known = len(runs_in(segments))
        if self.quantize_own:
            segments = quantize(segments, self._length - count_tokens(segments), self.scheme, self._longest_run)
        self._own_runs = min(self._own_runs, known) + len(runs_in(segments)) - known
        tail = after_runs(segments)
        self._shared = self._kept(self._join_own(segments[: len(segments) - len(tail)]))
        self._own = GrowingKeyValues(*own_copy(tail)) if tail else None

    def _join_own(self, segments: Segments) -> Segments:
        """Join short runs at the end, each time as many tokens as were joined before: few runs, few copies."""
        held = list(segments)
        while self._own_runs > 1:
            before, last = held[-2:]
            if not (isinstance(before, QuantizedRun) and isinstance(last, QuantizedRun)):
                break
            fits = self._longest_run is None or before.tokens + last.tokens <= self._longest_run
            if not (fits and before.tokens <= last.tokens and before.is_whole and last.is_whole):
                break
            held[-2:] = [join_runs([before, last])]
            self._own_runs -= 1
        return tuple(held)

    def _kept(self, segments: Segments) -> Segments:
        """Return ``segments`` with quantized ones where they are to live."""
        tier = self._tier
        if tier is None:
            return segments
        return tuple(part.kept(tier.keep(part)) if isinstance(part, QuantizedRun) else part for part in segments)

    def _present(self, segments: Segments) -> Segments:
        """Return ``segments``, all that is held, on the device that computes."""
        if not self.is_apart or not runs_in(segments):
            return segments
        self.fetch(None)
        moved = iter(() if self._fetch is None else self._fetch.take())
        self._fetch = None
        return tuple(next(moved) if isinstance(part, QuantizedRun) else part for part in segments)

    def _decode(self, segments: Segments, rows: int, tokens: int | None) -> KeyValues:
        """Return the last ``tokens`` tokens of ``segments`` (all for None) as one pair of tensors of ``rows`` rows."""
        if tokens is not None:
            segments = split(segments, count_tokens(segments) - tokens)[1]
        # What autograd saves for the backward pass must not be written over.
        if torch.is_grad_enabled() or not runs_in(segments):
            return join(exact(segments), rows)
        *_, newest = segments
        kinds = (part.dtype if isinstance(part, QuantizedRun) else part.keys.dtype for part in segments)
        total = count_tokens(segments)
        shapes = ((rows, part.shape[1], total, part.shape[3]) for part in _like(newest, newest.device))
        out = self._scratch.take(*shapes, device=newest.device, dtype=reduce(torch.promote_types, kinds))
        start = 0
        for segment in segments:
            target = out.slice(start, start + segment.tokens)
            if isinstance(segment, QuantizedRun):
                segment.write(target)
                if self._tier is not None:
                    self._tier.release(segment)
            else:
                target.keys.copy_(segment.keys)
                target.values.copy_(segment.values)
            start += segment.tokens
        return out

    def _gather(self, tokens: int | None = None) -> KeyValues:
        segments = self._present(self.attention_state().segments)
        if tokens is not None:
            segments = split(segments, count_tokens(segments) - tokens)[1]
        return join(exact(segments), self._rows or 1)


class PrefixQuantizedSlidingWindowLayer(PrefixQuantizedLayer, PrefixDynamicSlidingWindowLayer):
    """A layer with a sliding window or chunk, of which it quantizes what is wider than the residual.

    Args:
        sliding_window: Width of the window.
        scheme: How it quantizes.
        scratch: Memory to decode into, shared by the layers of a cache.
        quantize_own: Whether tokens that are added are quantized, and not only those that are loaded.
    """

    def __init__(self, sliding_window: int, scheme: Scheme, scratch: Scratch, *, quantize_own: bool = True) -> None:
        PrefixDynamicSlidingWindowLayer.__init__(self, sliding_window)
        self.scheme, self.quantize_own = scheme, quantize_own
        self._scratch, self._tier = scratch, None  # windows are small: they stay on the device
        self._own_runs, self._fetch = 0, None
        self.home = torch.device("cpu")
        # A window drops whole runs: with several of them its storage shrinks as it moves on.
        size = scheme.group_tokens
        self._longest_run = max(size, sliding_window // 4 // size * size)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens ``[rows, heads, tokens, head_dim]`` and return them behind the window before them.

        Raises:
            BatchSizeError: The rows differ from those held.
            UnsupportedModelError: A dtype or size of heads that is not quantized.
        """
        result = PrefixQuantizedLayer.update(self, key_states, value_states)
        if not self.record_past:
            self._trim()
        return result

    def _visible(self, added: int) -> int | None:
        return min(self._length, self.sliding_window - 1) + added

    def _retained(self, segments: Segments) -> Segments:
        surplus = count_tokens(segments) - self.sliding_window
        return segments if self.record_past or surplus <= 0 else split(segments, surplus)[1]

    def _is_due(self, segments: Segments) -> bool:
        # A long prefill leaves only its end behind: nothing longer than the window is stored.
        is_long = segments[-1].tokens >= self.sliding_window and not self.record_past
        return is_long or super()._is_due(segments)


def _like(segment: Segment, device: torch.device) -> KeyValues:
    """Return keys and values of no tokens on ``device``, of the shape and dtype of those of ``segment``."""
    if isinstance(segment, KeyValues):
        return KeyValues(*(part.to(device) for part in segment.slice(0, 0)))
    return KeyValues(
        *(
            torch.empty((*packed[0].shape[:2], 0, size), dtype=segment.dtype, device=device)
            for packed, size in zip((segment.keys, segment.values), segment.head_dims, strict=True)
        )
    )
