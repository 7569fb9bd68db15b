"""What changes a cache in place: taking tokens back, and choosing, repeating and ordering rows."""

from __future__ import annotations

import torch

from ..exceptions import BatchSizeError, NotCroppableError
from .running import RunningStateCache

__all__ = ["EditableCache"]


class EditableCache(RunningStateCache):
    """A cache that can be cropped and whose rows can be selected; what it was told of them follows."""

    _known_ids: torch.Tensor | None = None

    @property
    def rows(self) -> int | None:
        """Rows of the batch, or None while nothing is held."""
        rows: int | None = self._leading_layer.rows
        return rows

    @property
    def known_ids(self) -> torch.Tensor | None:
        """Token ids ``[rows or 1, n]`` of the first tokens held, as far as the cache was told; else None."""
        return self._known_ids

    @known_ids.setter
    def known_ids(self, input_ids: torch.Tensor | None) -> None:
        self._known_ids = None if input_ids is None else input_ids[:, : self.seq_length].cpu()

    def can_crop_to(self, length: int) -> bool:
        """Return whether `crop_to` works."""
        return 0 <= length <= self.seq_length and all(layer.can_crop_to(length) for layer in self.layers)

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens.

        Raises:
            NotCroppableError: More tokens than are held, or a window has moved on; nothing was changed.
        """
        held = self.seq_length
        if not 0 <= length <= held:
            raise NotCroppableError(
                f"the cache cannot be cropped to {length} tokens: it holds {held}; pass a length from 0 to {held}"
            )
        if not self.can_crop_to(length):
            raise NotCroppableError(
                f"the cache cannot be cropped from {held} to {length} tokens: a window or running state has moved "
                "on and no longer holds what came before; restore a snapshot taken at that length, or call "
                "activate_past_recording on a dynamic cache before the tokens to undo are added"
            )
        for layer in self.layers:
            layer.crop_to(length)
        self._crop_padding(length)
        if self._known_ids is not None:
            self._known_ids = self._known_ids[:, :length]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (Transformers' rule: the argument is 0 or negative).

        With past recording on, this also forgets what windows no longer need, also for 0.

        Raises:
            ValueError: The argument is positive.
            NotCroppableError: More tokens than are held, or a window has moved on; nothing was changed.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop was called with {tokens_to_remove}; it takes 0 or the negative number of tokens to remove: use "
                f"crop_to({tokens_to_remove}) to keep the first {tokens_to_remove}"
            )
        held = self.seq_length
        if -tokens_to_remove > held:
            raise NotCroppableError(
                f"crop was called with {tokens_to_remove}, but only {held} tokens are held; remove {held} at most"
            )
        self.crop_to(held + tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was; a prefix that all rows share is not touched.

        Raises:
            BatchSizeError: No rows, rows that are not held, or more than a static cache holds.
        """
        rows = self.rows
        if rows is None:
            return
        if not len(beam_idx) or not 0 <= int(beam_idx.min()) <= int(beam_idx.max()) < rows:
            raise BatchSizeError(
                f"rows {beam_idx.tolist()} were asked for but the cache holds {rows}; name at least one, from 0 to "
                f"{rows - 1}"
            )
        for layer in self.layers:
            layer.reorder_cache(beam_idx)
        self._select_padding(beam_idx)
        if self._known_ids is not None and self._known_ids.shape[0] > 1:
            self._known_ids = self._known_ids.index_select(0, beam_idx.cpu())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times in place of itself.

        Raises:
            BatchSizeError: ``repeats`` is below 1, or a static cache does not hold that many rows.
        """
        if repeats < 1:
            raise BatchSizeError(f"repeats is {repeats}; it must be at least 1")
        if self.rows is not None:
            self.reorder_cache(torch.arange(self.rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that ``indices`` (positions or a boolean mask) names, in that order.

        Raises:
            BatchSizeError: No rows, rows that are not held, or more than a static cache holds.
        """
        rows = self.rows
        if rows is None:
            return
        if indices.dtype == torch.bool:
            if len(indices) != rows:
                raise BatchSizeError(f"indices has {len(indices)} entries but the cache holds {rows} rows")
            indices = indices.nonzero()[:, 0]
        self.reorder_cache(torch.where(indices < 0, indices + rows, indices))

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._padding = self._known_ids = None
