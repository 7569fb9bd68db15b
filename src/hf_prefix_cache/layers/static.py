"""Attention layers with buffers of a fixed size, for compiled code."""

from abc import abstractmethod
from typing import Any

import torch
from transformers.cache_utils import StaticLayer

from ..exceptions import BatchSizeError, CacheCapacityError, InputMismatchError
from .deferred import SharedPart, attach
from .state import AttentionState, KeyValues

__all__ = ["PrefixStaticLayer", "StaticRows"]


class StaticRows(StaticLayer):
    """What all kinds share: buffers ``[max rows, heads, max_cache_len, head_dim]``; the first rows are in use.

    Everything works in place and keeps the tensors' addresses. The buffers are ordinary tensors also where they are
    made in inference mode, so that they can be written outside of it.
    """

    keys: torch.Tensor
    values: torch.Tensor
    window: int | None = None
    holds_keys = True
    max_batch_size: int | None = None
    active_rows: int
    total_len: int  # tokens that the cache may see; the buffers of a window hold fewer

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers, with ``max_batch_size`` rows where that was asked for."""
        rows = key_states.shape[0]
        wanted = max(rows, self.max_batch_size or rows)
        with torch.inference_mode(False):
            super().lazy_initialization(
                key_states[:1, :, :0].expand(wanted, -1, -1, -1), value_states[:1, :, :0].expand(wanted, -1, -1, -1)
            )
        self.active_rows = rows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens ``[rows, heads, tokens, head_dim]`` and return the buffers' rows in use.

        Raises:
            BatchSizeError: More rows than the buffers have, or other rows than those held.
            CacheCapacityError: More tokens than the buffers have room for.
        """
        rows = key_states.shape[0]
        self.check_room(key_states.shape[-2])
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.check_rows(rows)
        KeyValues(self.keys, self.values).check_continued_by(key_states, value_states)
        if key_states.dtype != self.keys.dtype:
            raise InputMismatchError(
                f"the new keys have dtype {key_states.dtype} but the static cache holds {self.keys.dtype}; run the "
                "prefix and what follows it in one dtype (autocast counts)"
            )
        self.active_rows = rows
        self.count(key_states.shape[-2])
        if rows == self.batch_size:
            return self.write(key_states, value_states, *args, **kwargs)
        whole = self.keys, self.values
        self.keys, self.values = self.keys[:rows], self.values[:rows]
        try:
            return self.write(key_states, value_states, *args, **kwargs)
        finally:
            self.keys, self.values = whole

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens that fit; return what their queries may attend to."""
        return super().update(key_states, value_states, *args, **kwargs)

    def check_rows(self, rows: int) -> None:
        """Raise `BatchSizeError` unless a batch of ``rows`` fits the buffers and continues what is held."""
        if not self.is_initialized:
            return
        self._check_fits(rows)
        if torch.compiler.is_compiling():  # compiled code must not depend on what is held
            return
        if rows != self.active_rows and self.seen():
            raise BatchSizeError(
                f"the batch has {rows} rows but the cache holds {self.active_rows} filled ones; fork the cache with "
                f"batch_size={rows}, or select rows with batch_select_indices"
            )

    def check_room(self, added: int) -> None:
        """Raise `CacheCapacityError` unless ``added`` tokens fit behind those held."""
        if torch.compiler.is_compiling():  # reading the length would break the graph
            return
        if self.seen() + added > self.total_len:
            raise CacheCapacityError(
                f"{added} tokens do not fit behind the {self.seen()} held by a static cache with max_cache_len "
                f"{self.total_len}; make it with max_cache_len of at least {self.seen() + added}"
            )

    def check_load(self, state: AttentionState, rows: int) -> None:
        """Raise unless `load` would work."""
        if state.length > self.total_len:
            raise CacheCapacityError(
                f"max_cache_len is {self.total_len} but the prefix alone has {state.length} tokens; pass "
                f"max_cache_len of at least {state.length} plus the tokens you will add"
            )
        if not self.is_initialized or not state.length:
            return
        self._check_fits(rows)
        dtype = state.segments[-1].keys.dtype
        if dtype != self.keys.dtype:
            raise InputMismatchError(
                f"the prefix has dtype {dtype} but the static cache holds {self.keys.dtype}; make a new cache for it"
            )

    def _check_fits(self, rows: int) -> None:
        if rows > self.batch_size:
            raise BatchSizeError(
                f"{rows} rows do not fit the static cache, which has room for {self.batch_size}; make it with "
                f"max_batch_size={rows}, or fork it with batch_size={rows}"
            )

    @property
    def is_sliceable(self) -> bool:
        """Whether every shorter prefix can be taken from it exactly."""
        return self.window is None

    @abstractmethod
    def seen(self) -> int:
        """Return the tokens seen, as a plain int."""

    def count(self, added: int) -> None:
        """Note that ``added`` tokens come, where Transformers' ``update`` does not do so itself."""

    @abstractmethod
    def set_length(self, length: int) -> None:
        """Set the number of tokens seen, in place."""

    @property
    def rows(self) -> int | None:
        """Rows in use, or None while nothing is held."""
        return self.active_rows if self.is_initialized and self.seen() else None

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; `can_crop_to` says whether that is possible."""
        self.crop_to(max(0, self.seen() + tokens_to_remove))

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept exactly."""
        return self.attention_state().can_crop_to(length)

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens, in place."""
        self.set_length(length)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was, in place.

        Raises:
            BatchSizeError: More rows than the buffers have.
        """
        if not self.is_initialized or not self.seen():
            return
        rows = len(beam_idx)
        self._check_fits(rows)
        index = beam_idx.to(self.keys.device)
        for buffer in (self.keys.detach(), self.values.detach()):
            buffer[:rows].copy_(buffer.index_select(0, index))
        self.active_rows = rows

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row in use ``repeats`` times in place of itself, in place.

        Raises:
            BatchSizeError: More rows than the buffers have.
        """
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.active_rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that ``indices`` (positions or a boolean mask) names, in that order, in place.

        Raises:
            BatchSizeError: More rows than the buffers have.
        """
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.active_rows)[indices.cpu()])

    def reset(self) -> None:
        """Forget everything; the buffers stay where they are."""
        self._forget_graph()
        super().reset()
        self.set_length(0)

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        return [self.keys, self.values] if self.is_initialized else []

    def held(self) -> int:
        """Return how many tokens the buffers hold."""
        return min(self.seen(), self.max_cache_len)

    def lost(self) -> int:
        """Return how many of them, at the front, are not to be used."""
        return 0

    def attention_state(self) -> AttentionState:
        """Return what is held as views of the buffers: for questions, not for keeping."""
        if not self.is_initialized or not self.seen():
            return AttentionState((), 0, self.window)
        rows = KeyValues(self.keys[: self.active_rows], self.values[: self.active_rows])
        return AttentionState((rows.slice(self.lost(), self.held()).detach(),), self.seen(), self.window)

    def state(self) -> AttentionState:
        """Return what is held, uncopied: for questions, not for keeping."""
        return self.attention_state()

    def share(self) -> AttentionState:
        """Return a copy of what is held."""
        return self.attention_state().compact()

    def load(self, state: AttentionState, rows: int) -> None:
        """Copy ``state`` into the buffers for a batch of ``rows``; their addresses stay. Ask `check_load` before."""
        if not state.length:
            self.reset()
            return
        sample = state.segments[-1]
        if not self.is_initialized:
            self.lazy_initialization(
                *(tensor[:1, :, :0].expand(rows, -1, -1, -1) for tensor in (sample.keys, sample.values))
            )
        self._forget_graph()
        held = state.length - state.first
        position = max(0, min(state.length, self.max_cache_len) - held)
        skipped = max(0, held - self.max_cache_len)
        with torch.no_grad():
            for segment in state.segments:
                dropped = min(skipped, segment.tokens)
                skipped -= dropped
                part = segment.slice(dropped, segment.tokens)
                for buffer, tensor in zip((self.keys, self.values), part, strict=True):
                    buffer[:rows, :, position : position + part.tokens] = tensor
                position += part.tokens
        self.active_rows = rows
        self.set_length(state.length)

    def _forget_graph(self) -> None:
        for buffer in self.tensors():
            if buffer.requires_grad:
                buffer.detach_()


class PrefixStaticLayer(StaticRows):
    """A full-attention layer of fixed size."""

    is_croppable = True
    reads_held = False  # hand out what is held only, for forwards that are not compiled
    reach: int | None = None  # places that compiled steps hand out, from the first on; None for all of them
    apart: tuple[KeyValues, ...] = ()  # what the buffers begin with: handed to attention beside the rest of them

    def __init__(self, max_cache_len: int) -> None:
        with torch.inference_mode(False):
            StaticLayer.__init__(self, max_cache_len=max_cache_len)
        self.total_len = max_cache_len
        # What `cumulative_length` holds, without asking the device. None after compiled code, which cannot keep it.
        self._seen: int | None = 0

    def seen(self) -> int:
        """Return the tokens seen, as a plain int."""
        if self._seen is None:
            self._seen = int(self.cumulative_length)
        return self._seen

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens that fit; return what their queries may attend to, and the room behind it."""
        keys, values = super().write(key_states, value_states, *args, **kwargs)
        if not self.reads_held:
            # Slices by a number that is fixed for each graph: views, whose addresses stay.
            return (keys, values) if self.reach is None else (keys[:, :, : self.reach], values[:, :, : self.reach])
        if not self.apart or torch.is_grad_enabled():
            return keys[:, :, : self.seen()], values[:, :, : self.seen()]
        part = SharedPart(self.apart)
        return attach(keys[:, :, part.tokens : self.seen()], part), values[:, :, part.tokens : self.seen()]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys that ``query_length`` further queries are handed, and the first one's position."""
        if self.reads_held:
            return self.seen() + query_length, 0
        return super().get_mask_sizes(query_length) if self.reach is None else (self.reach, 0)

    def check_room(self, added: int) -> None:
        """Raise `CacheCapacityError` unless ``added`` tokens fit behind those held, and attention reaches them."""
        super().check_room(added)
        if self.reach is None or self.reads_held or torch.compiler.is_compiling():
            return
        if self.seen() + added > self.reach:
            raise CacheCapacityError(
                f"attention reads the first {self.reach} places of the static cache but it holds {self.seen()} tokens "
                f"and {added} come: set its reach to at least {self.seen() + added}, or to None to read all of them"
            )

    def count(self, added: int) -> None:
        """Note that ``added`` tokens come."""
        self._seen = None if torch.compiler.is_compiling() else self.seen() + added

    def set_length(self, length: int) -> None:
        """Set the number of tokens seen, in place."""
        self.cumulative_length.fill_(length)
        self._seen = length
