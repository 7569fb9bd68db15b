"""Attention layers that hold most of their tokens in few bits: full attention, and sliding or chunked windows."""

from functools import reduce
from typing import Any

import torch

from ..exceptions import InputMismatchError
from ..quantization import Scheme
from .dynamic import PrefixDynamicLayer, PrefixDynamicSlidingWindowLayer
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
    """

    _shared: Segments  # type: ignore[assignment]

    def __init__(self, scheme: Scheme, scratch: Scratch, *, quantize_own: bool = True) -> None:
        PrefixDynamicLayer.__init__(self)
        self.scheme, self.quantize_own = scheme, quantize_own
        self._scratch = scratch
        self._own_runs = 0  # of the quantized runs, how many at the end nobody else holds

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember where and in which dtype the tokens live.

        Raises:
            UnsupportedModelError: A dtype or size of heads that is not quantized.
        """
        self.scheme.check(key_states, value_states)
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
        """
        self._check_continued_by(key_states, value_states)
        new = KeyValues(key_states, value_states)
        visible = self._visible(new.tokens)
        segments = (*self.attention_state().segments, new)
        if self._is_due(segments):
            result = self._decode(segments, new.rows, visible)
            self._length, self._rows = self._length + new.tokens, new.rows
            self._hold(segments)
        else:
            self._append(key_states, value_states)
            self._length += new.tokens
            result = self._decode(self.attention_state().segments, new.rows, visible)
        return result.keys, result.values

    def check_load(self, state: AttentionState, rows: int) -> None:
        """Raise unless `load` would work.

        Raises:
            InputMismatchError: The state was quantized in another way.
            UnsupportedModelError: A dtype or size of heads that is not quantized.
        """
        if isinstance(state, QuantizedState) and state.scheme != self.scheme:
            raise InputMismatchError(
                f"the prefix was quantized as {state.scheme.name}, but the cache quantizes as {self.scheme.name}; "
                "make the cache with the options of the one that filled the prefix"
            )
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
        self.lazy_initialization(*_like(segments[-1]))
        self._shared, self._length, self._rows = segments, state.length, rows

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._own_runs = 0

    def share(self) -> QuantizedState:
        """Return what is held; no later operation of this layer changes its bytes. No copy."""
        self._own_runs = 0
        super().share()
        return self.attention_state()

    def attention_state(self) -> QuantizedState:
        """Return what is held as views, without freezing it: for questions, not for keeping."""
        state = super().attention_state()
        return QuantizedState(state.segments, state.length, self.window, scheme=self.scheme)

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
        self._shared = self._join_own(segments[: len(segments) - len(tail)])
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

    def _decode(self, segments: Segments, rows: int, tokens: int | None) -> KeyValues:
        """Return the last ``tokens`` tokens of ``segments`` (all for None) as one pair of tensors of ``rows`` rows."""
        if tokens is not None:
            segments = split(segments, count_tokens(segments) - tokens)[1]
        # What autograd saves for the backward pass must not be written over.
        if torch.is_grad_enabled() or not runs_in(segments):
            return join(exact(segments), rows)
        sample = [_like(segment) for segment in segments]
        dtype = reduce(torch.promote_types, (part.keys.dtype for part in sample))
        total = count_tokens(segments)
        shapes = ((rows, part.shape[1], total, part.shape[3]) for part in sample[0])
        out = self._scratch.take(*shapes, device=sample[-1].keys.device, dtype=dtype)
        start = 0
        for segment in segments:
            target = out.slice(start, start + segment.tokens)
            if isinstance(segment, QuantizedRun):
                segment.write(target)
            else:
                target.keys.copy_(segment.keys)
                target.values.copy_(segment.values)
            start += segment.tokens
        return out

    def _gather(self, tokens: int | None = None) -> KeyValues:
        segments = self.attention_state().segments
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
        self._scratch, self._own_runs = scratch, 0
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


def _like(segment: Segment) -> KeyValues:
    """Return keys and values of no tokens, of the shape, dtype and device of those of ``segment``."""
    if isinstance(segment, KeyValues):
        return segment.slice(0, 0)
    return KeyValues(
        *(
            torch.empty((*packed[0].shape[:2], 0, size), dtype=segment.dtype, device=segment.device)
            for packed, size in zip((segment.keys, segment.values), segment.head_dims, strict=True)
        )
    )
