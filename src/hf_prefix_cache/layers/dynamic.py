"""Attention layers that grow: full attention, and sliding or chunked windows."""

from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

from ..exceptions import BatchSizeError
from .deferred import SharedPart, attach
from .growing import GrowingKeyValues
from .state import AttentionState, KeyValues

__all__ = ["PrefixDynamicLayer", "PrefixDynamicSlidingWindowLayer"]


class PrefixDynamicLayer(DynamicLayer):
    """A full-attention layer: tokens shared with snapshots and forks, then own tokens that grow in place.

    Shared tokens are never written to. Attention needs one tensor, so while a layer runs it gathers the shared and
    the own part; nothing gathered is kept.
    """

    window: int | None = None
    holds_keys = True

    def __init__(self) -> None:
        self._shared: tuple[KeyValues, ...] = ()
        self._own: GrowingKeyValues | None = None
        self._rows: int | None = None  # rows of the batch; None while nothing is held
        self._length = 0
        self._unshares = False  # the next tokens make what is shared own
        self.defers = False  # hand shared tokens to attention beside own ones, ungathered
        self.deferred: SharedPart | None = None
        self._empty: torch.Tensor | None = None
        CacheLayerMixin.__init__(self)

    # Transformers and others read these two attributes of every layer.

    @property
    def keys(self) -> torch.Tensor | None:
        """All retained keys, ``[rows, heads, tokens, head_dim]``; gathered, hence a copy, where a part is shared."""
        return self._gather().keys if self._length else self._empty

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        _refuse_assignment(value)

    @property
    def values(self) -> torch.Tensor | None:
        """All retained values, ``[rows, heads, tokens, head_dim]``; gathered, hence a copy, where a part is shared."""
        return self._gather().values if self._length else self._empty

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        _refuse_assignment(value)

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember where and in which dtype the tokens live."""
        self.device = key_states.device
        self._empty = torch.tensor([], dtype=key_states.dtype, device=self.device)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens ``[rows, heads, tokens, head_dim]`` and return all that their queries may attend to.

        Raises:
            BatchSizeError: The rows differ from those held.
        """
        own = self._own
        if own is None or self._unshares or not own.continues(key_states, value_states):
            self._check_continued_by(key_states, value_states)
            own = self._append(key_states, value_states)
        else:
            own.append(key_states, value_states)
        self._length += key_states.shape[-2]
        if not self._shared:
            return own.view()
        if self.defers and not torch.is_grad_enabled():
            held = own.view()
            self.deferred = SharedPart(self._shared)
            return attach(held.keys, self.deferred), held.values
        return self._gather()

    def check_rows(self, rows: int) -> None:
        """Raise `BatchSizeError` unless a batch of ``rows`` continues what is held."""
        if self._rows is not None and rows != self._rows:
            raise BatchSizeError(
                f"the batch has {rows} rows but the cache holds {self._rows}; fork the cache with "
                f"batch_size={rows}, or select rows with batch_select_indices"
            )

    def _check_continued_by(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.check_rows(key_states.shape[0])
        for part in self.attention_state().segments[:1]:
            part.check_continued_by(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)

    def check_room(self, added: int) -> None:
        """Accept any number of further tokens: this layer grows."""

    def check_load(self, state: AttentionState, rows: int) -> None:
        """Accept any state: this layer grows."""

    @property
    def rows(self) -> int | None:
        """Rows of the batch, or None while nothing is held."""
        return self._rows

    @property
    def shared_tokens(self) -> int:
        """Tokens that all rows share, stored once."""
        return sum(segment.tokens for segment in self._shared if segment.rows == 1)

    @property
    def is_sliceable(self) -> bool:
        """Whether every shorter prefix can be taken from it exactly."""
        return self.window is None

    def seen(self) -> int:
        """Return the tokens seen, as a plain int."""
        return self._length

    def get_seq_length(self) -> int:
        """Return the tokens seen."""
        return self._length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that ``query_length`` further queries see, and the position of the first."""
        return self._length + query_length, 0

    def reset(self) -> None:
        """Forget everything."""
        self._shared, self._own, self._rows, self._length = (), None, None, 0
        self._unshares, self.deferred = False, None
        self._empty = None
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; `can_crop_to` says whether that is possible."""
        self.crop_to(max(0, self._length + tokens_to_remove))

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept exactly."""
        return self.attention_state().can_crop_to(length)

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens."""
        remove = self._length - length
        if self._own is not None:
            from_own = min(remove, self._own.tokens)
            self._own.keep_first(self._own.tokens - from_own)
            remove -= from_own
        if remove:
            shared = AttentionState(self._shared, length + remove, self.window)
            self._shared = shared.crop_to(length).segments
        self._length = length
        if not length:
            self._shared, self._own, self._rows = (), None, None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was; tokens that all rows share are not touched."""
        if not self._length:
            return
        if self._rows == 1:
            # Every row becomes the one there is: it is shared from now on, not repeated.
            if len(beam_idx) > 1:
                if self._own is not None:
                    self._own.freeze()
                self._shared, self._own = self.attention_state().segments, None
                self._unshares = False
        else:
            self._shared = tuple(segment.select(beam_idx) for segment in self._shared)
            self._own = None if self._own is None else self._own.select(beam_idx)
        self._rows = len(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times in place of itself."""
        if self._rows is not None:
            self.reorder_cache(torch.arange(self._rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that ``indices`` (positions or a boolean mask) names, in that order."""
        if self._rows is not None:
            self.reorder_cache(torch.arange(self._rows)[indices.cpu()])

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held, spare room included."""
        own = [] if self._own is None else list(self._own.tensors())
        return [tensor for segment in self._shared for tensor in segment] + own

    def attention_state(self) -> AttentionState:
        """Return what is held as views, without freezing it: for questions, not for keeping."""
        own = () if self._own is None or not self._own.tokens else (self._own.view(),)
        return AttentionState(self._shared + own, self._length, self.window)

    def state(self) -> AttentionState:
        """Return what is held, uncopied: for questions, not for keeping."""
        return self.attention_state()

    def share(self) -> AttentionState:
        """Return what is held; no later operation of this layer changes its bytes. No copy."""
        if self._own is not None:
            self._own.freeze()
        return self.attention_state()

    def load(self, state: AttentionState, rows: int) -> None:
        """Hold ``state`` for a batch of ``rows``, sharing its tensors."""
        self.reset()
        if not state.length:
            return
        sample = state.segments[-1]
        self.lazy_initialization(sample.keys, sample.values)
        self._shared, self._length, self._rows = state.segments, state.length, rows

    def unshare(self) -> None:
        """Make what is shared own, copied once, with the next tokens: decoding then grows in place."""
        self._unshares = bool(self._shared)

    def _append(self, key_states: torch.Tensor, value_states: torch.Tensor) -> GrowingKeyValues:
        if self._unshares:
            if self._shared:  # a window's long prefill has forgotten it
                self._own = self._copied(key_states.shape[-2])
            self._shared, self._unshares = (), False
        if self._own is None:
            self._own = GrowingKeyValues(key_states[..., :0, :], value_states[..., :0, :])
        self._own.append(key_states, value_states)
        self._rows = key_states.shape[0]
        return self._own

    def _copied(self, added: int) -> GrowingKeyValues:
        if torch.is_grad_enabled():
            return GrowingKeyValues(*self._gather())
        return GrowingKeyValues.copied(self.attention_state().segments, self._rows or 1, added)

    def _gather(self, tokens: int | None = None) -> KeyValues:
        """Return the last ``tokens`` retained tokens (all by default) of every row as one pair of tensors."""
        segments = self.attention_state().segments
        if tokens is not None:
            segments = _last(segments, tokens)
        rows = self._rows or 1
        if len(segments) == 1:
            return KeyValues(*(tensor.expand(rows, -1, -1, -1) for tensor in segments[0]))
        keys = torch.cat([segment.keys.expand(rows, -1, -1, -1) for segment in segments], dim=-2)
        values = torch.cat([segment.values.expand(rows, -1, -1, -1) for segment in segments], dim=-2)
        return KeyValues(keys, values)


class PrefixDynamicSlidingWindowLayer(PrefixDynamicLayer, DynamicSlidingWindowLayer):
    """A layer with a sliding window or chunk.

    It retains as many tokens as the window is wide, one more than the next token attends to, so that the last token
    can always be taken back and fed again.
    """

    is_sliding = True

    def __init__(self, sliding_window: int) -> None:
        PrefixDynamicLayer.__init__(self)
        self.window = self.sliding_window = sliding_window
        # Read by DynamicCache.__iter__, which data-parallel gathering relies on.
        self._sliding_window_tensor = torch.tensor(sliding_window, dtype=torch.long)
        self.record_past = False

    @property
    def cumulative_length(self) -> int:  # type: ignore[override]
        """Tokens seen, under the name that Transformers' sliding layers use."""
        return self._length

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Remember where and in which dtype the tokens live."""
        super().lazy_initialization(key_states, value_states)
        self._sliding_window_tensor = self._sliding_window_tensor.to(self.device)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens ``[rows, heads, tokens, head_dim]`` and return them behind the window before them.

        Raises:
            BatchSizeError: The rows differ from those held.
        """
        self._check_continued_by(key_states, value_states)
        added = key_states.shape[-2]
        visible = min(self._length, self.sliding_window - 1) + added
        if added < self.sliding_window or self.record_past:
            self._append(key_states, value_states)
            self._length += added
            result = self._gather(visible)
        else:
            # A long prefill leaves only its end behind: nothing longer than the window is stored.
            result = KeyValues(key_states, value_states)
            if visible > added:
                before = self._gather(visible - added)
                result = KeyValues(
                    torch.cat([before.keys, key_states], dim=-2), torch.cat([before.values, value_states], dim=-2)
                )
            self._shared, self._own = (), None
            self._append(*KeyValues(key_states, value_states).slice(added - self.sliding_window, added))
            self._length += added
        if not self.record_past:
            self._trim()
        return result.keys, result.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that ``query_length`` further queries see, and the position of the first."""
        visible = min(self._length, self.sliding_window - 1)
        return visible + query_length, self._length - visible

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens, and with recording on forget what the window has left behind."""
        PrefixDynamicLayer.crop_to(self, length)
        self._trim()

    def _trim(self) -> None:
        """Forget tokens that have left the window, but for one."""
        held = (0 if self._own is None else self._own.tokens) + sum(part.tokens for part in self._shared)
        surplus = held - self.sliding_window
        while surplus > 0 and self._shared:
            first, *rest = self._shared
            dropped = min(surplus, first.tokens)
            self._shared = (*([first.slice(dropped, first.tokens)] if dropped < first.tokens else []), *rest)
            surplus -= dropped
        if surplus > 0 and self._own is not None:
            self._own.drop_first(surplus)
            self._own.give_back_room()


def _last(segments: tuple[KeyValues, ...], tokens: int) -> tuple[KeyValues, ...]:
    """Return the part of ``segments`` that holds the last ``tokens`` tokens."""
    kept: list[KeyValues] = []
    for segment in reversed(segments):
        if tokens <= 0:
            break
        kept.insert(0, segment if segment.tokens <= tokens else segment.slice(segment.tokens - tokens, segment.tokens))
        tokens -= segment.tokens
    return tuple(kept)


def _refuse_assignment(value: torch.Tensor | None) -> None:
    if value is not None:
        raise AttributeError(
            "the keys and values of a prefix layer cannot be assigned, since snapshots and forks may share them; use "
            "crop, reorder_cache or batch_select_indices, or a plain DynamicCache where something else edits them"
        )
