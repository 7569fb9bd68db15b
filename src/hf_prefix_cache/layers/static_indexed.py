"""Sparse attention that picks tokens by an index (DeepSeek-V3.2 and its like), with buffers of a fixed size."""

from typing import Any

import torch
from transformers.cache_utils import StaticIndexedLayer

from ..exceptions import CacheCapacityError
from .kept import KeptKind, KeptState
from .state import AttentionState, KeyValues
from .static import PrefixStaticLayer

__all__ = ["INDEXED", "PrefixStaticIndexedLayer"]

INDEXED = KeptKind(
    batch_dims={"indexer_position_ids": 1},
    token_dims={"keys": -2, "values": -2, "indexer_keys": 1, "indexer_position_ids": -1},
    writes_in_place=False,
)
"""What such a layer holds, in growing caches too: beside keys and values those of the index, ``[rows, tokens, dim]``,
and on some models the positions of all tokens, ``[3, rows, tokens]``."""


class PrefixStaticIndexedLayer(PrefixStaticLayer, StaticIndexedLayer):
    """A sparse-attention layer of fixed size, whose index has a buffer ``[max rows, max_cache_len, dim]``.

    Its state is that of the growing layer, so that either continues what the other has computed.
    """

    indexer_keys: torch.Tensor | None
    indexer_position_ids: torch.Tensor | None = None
    indexer_cumulative_length: torch.Tensor | None

    def __init__(self, max_cache_len: int) -> None:
        with torch.inference_mode(False):
            StaticIndexedLayer.__init__(self, max_cache_len=max_cache_len)
        PrefixStaticLayer.__init__(self, max_cache_len)
        # Tokens in the index, without asking the device: models fill it before the keys, or after them. None after
        # compiled code, which cannot keep it.
        self._indexed: int | None = 0

    @property
    def is_sliceable(self) -> bool:
        """Whether every shorter prefix can be taken from it exactly: its tokens are more than keys and values."""
        return False

    def update_indexer(self, indexer_key_states: torch.Tensor) -> torch.Tensor:
        """Write keys of the index ``[rows, tokens, dim]`` and return the buffer's rows in use.

        Raises:
            BatchSizeError: More rows than the buffers have, or other rows than those held.
            CacheCapacityError: More tokens than the buffers have room for.
        """
        rows, added = indexer_key_states.shape[:2]
        self.check_rows(rows)
        self._count_indexed(added)
        if self.indexer_keys is None:
            self._make_index(indexer_key_states, rows)
        whole: Any = self.indexer_keys
        self.indexer_keys = whole[:rows]
        try:
            keys = super().update_indexer(indexer_key_states)
        finally:
            self.indexer_keys = whole
        if self.reads_held:
            return keys[:, : self.indexed()]
        return keys if self.reach is None else keys[:, : self.reach]

    def indexed(self) -> int:
        """Return the tokens in the index, as a plain int."""
        if self._indexed is None:
            length = self.indexer_cumulative_length
            self._indexed = 0 if length is None else int(length)
        return self._indexed

    def _count_indexed(self, added: int) -> None:
        if torch.compiler.is_compiling():  # reading the length would break the graph
            self._indexed = None
            return
        held = self.indexed()
        if held + added > self.total_len:
            raise CacheCapacityError(
                f"{added} tokens do not fit behind the {held} held by a static cache with max_cache_len "
                f"{self.total_len}; make it with max_cache_len of at least {held + added}"
            )
        self._indexed = held + added

    def _make_index(self, sample: torch.Tensor, rows: int) -> None:
        wanted = max(rows, self.max_batch_size or (self.batch_size if self.is_initialized else rows))
        with torch.inference_mode(False):
            self.lazy_initialization_indexer(sample[:1, :0].expand(wanted, -1, -1))

    def check_load(self, state: KeptState, rows: int) -> None:  # type: ignore[override]
        """Raise unless `load` would work."""
        super().check_load(_attention(state), rows)

    def set_length(self, length: int) -> None:
        """Set the number of tokens seen, in place."""
        super().set_length(length)
        self._indexed = length if self.indexer_keys is not None else 0
        if self.indexer_cumulative_length is not None:
            self.indexer_cumulative_length.fill_(length)
        positions = self.indexer_position_ids
        self.indexer_position_ids = positions[..., :length] if positions is not None and length else None

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was, in place.

        Raises:
            BatchSizeError: More rows than the buffers have.
        """
        super().reorder_cache(beam_idx)
        if not self.seen():
            return
        if self.indexer_keys is not None:
            buffer = self.indexer_keys.detach()
            buffer[: len(beam_idx)].copy_(buffer.index_select(0, beam_idx.to(buffer.device)))
        positions = self.indexer_position_ids
        if positions is not None:
            self.indexer_position_ids = positions.index_select(1, beam_idx.to(positions.device))

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        index = (self.indexer_keys, self.indexer_position_ids)
        return super().tensors() + [tensor for tensor in index if tensor is not None]

    def state(self) -> KeptState:  # type: ignore[override]
        """Return what is held as views of the buffers: for questions, not for keeping."""
        attention = self.attention_state()
        if not attention.length:
            return KeptState({}, 0, 1, INDEXED)
        (held,) = attention.segments
        values: dict[str, Any] = {**held._asdict(), "is_initialized": True}
        values |= {"dtype": held.keys.dtype, "device": held.keys.device}
        values |= {"indexer_keys": None, "is_indexer_initialized": False}
        if self.indexer_keys is not None:
            keys = self.indexer_keys.detach()[: self.active_rows, : attention.length]
            values |= {"indexer_keys": keys, "is_indexer_initialized": True}
            values |= {"indexer_dtype": keys.dtype, "indexer_device": keys.device}
        values["indexer_position_ids"] = self.indexer_position_ids
        return KeptState(values, attention.length, self.active_rows, INDEXED)

    def share(self) -> KeptState:  # type: ignore[override]
        """Return a copy of what is held."""
        return self.state().compact()

    def load(self, state: KeptState, rows: int) -> None:  # type: ignore[override]
        """Copy ``state`` into the buffers for a batch of ``rows``; their addresses stay. Ask `check_load` before."""
        keys, positions = (state.values.get(name) for name in ("indexer_keys", "indexer_position_ids"))
        if keys is not None and state.length:
            if self.indexer_keys is None:
                self._make_index(keys, rows)
            with torch.no_grad():
                self.indexer_keys.detach_()[:rows, : state.length] = keys  # type: ignore[union-attr]
        self.indexer_position_ids = None if positions is None else positions.expand(-1, rows, -1)
        super().load(_attention(state), rows)


def _attention(state: KeptState) -> AttentionState:
    """Return the keys and values in ``state``."""
    if not state.length:
        return AttentionState((), 0, None)
    return AttentionState((KeyValues(state.values["keys"], state.values["values"]),), state.length, None)
