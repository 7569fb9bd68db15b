"""Layers that hold nothing: those that read another layer's keys and values, and those that do not attend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..exceptions import UnsupportedModelError

__all__ = ["NothingState", "PrefixNothingLayer"]


@dataclass(frozen=True, eq=False)
class NothingState:
    """What a layer without a state holds after ``length`` tokens: nothing."""

    length: int = 0

    window = None
    rows = 1
    is_sliceable = False  # there is no token to take from it; `can_crop_to` says that any length will do
    kept = "nothing"

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor held."""
        yield from ()

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept: always."""
        return 0 <= length <= self.length

    def crop_to(self, length: int) -> NothingState:
        """Return the state after the first ``length`` tokens."""
        return replace(self, length=length)

    def row(self, index: int, start: int, stop: int) -> NothingState:
        """Return row ``index`` without the tokens (its padding) from ``start`` to ``stop``."""
        return replace(self, length=self.length - (stop - start))

    def select(self, rows: torch.Tensor) -> NothingState:
        """Return the state of ``rows``."""
        return self

    def compact(self) -> NothingState:
        """Return the same state."""
        return self

    def detach(self) -> NothingState:
        """Return the same state."""
        return self

    def to(self, device: torch.device | str) -> NothingState:
        """Return the same state."""
        return self


class PrefixNothingLayer:
    """A layer without a state. The cache tells it how many tokens there are when that is asked for."""

    supports_early_init = False
    is_initialized = True
    is_compileable = True
    is_croppable = True
    is_sliding = False
    is_sliceable = True
    holds_keys = False
    window: int | None = None
    rows: int | None = None
    keys = values = None
    defers = False

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> tuple[None, None]:
        """Accept nothing but nothing: such layers are never given keys.

        Raises:
            UnsupportedModelError: Keys or values.
        """
        if key_states is not None or value_states is not None:
            raise UnsupportedModelError(
                "a layer that its configuration says reads another layer's keys, or none, was given keys of its own, "
                "which would be lost; use Transformers' own cache, and please report the model"
            )
        return None, None

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def check_rows(self, rows: int) -> None:
        """Accept any batch."""

    def check_room(self, added: int) -> None:
        """Accept any number of further tokens."""

    def check_load(self, state: NothingState, rows: int) -> None:
        """Accept any state."""

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held: none."""
        return []

    def state(self) -> NothingState:
        """Return what is held; its length is the cache's to tell."""
        return NothingState()

    def share(self) -> NothingState:
        """Return what is held; its length is the cache's to tell."""
        return NothingState()

    def load(self, state: NothingState, rows: int) -> None:
        """Hold nothing."""

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept: always."""
        return True

    def crop_to(self, length: int) -> None:
        """Do nothing."""

    def crop(self, tokens_to_remove: int) -> None:
        """Do nothing."""

    def reset(self) -> None:
        """Do nothing."""

    def offload(self) -> None:
        """Do nothing."""

    def prefetch(self) -> None:
        """Do nothing."""

    def unshare(self) -> None:
        """Do nothing."""

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Do nothing."""

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Do nothing."""

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Do nothing."""
