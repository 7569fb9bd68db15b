"""Layers with a running state beside attention."""

from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from .dynamic import PrefixDynamicLayer, PrefixDynamicSlidingWindowLayer
from .recurrent import PrefixRecurrentLayer, RecurrentState
from .static import PrefixStaticLayer
from .static_window import PrefixStaticSlidingWindowLayer

__all__ = [
    "HybridLayer",
    "PrefixHybridLayer",
    "PrefixHybridSlidingWindowLayer",
    "PrefixStaticHybridLayer",
    "PrefixStaticHybridSlidingWindowLayer",
]


class HybridLayer(PrefixRecurrentLayer):
    """A running state beside attention; every operation acts on both.

    A subclass names the attention's class behind this one, so that in the order of methods everything of the running
    state comes first, then everything of the attention.
    """

    holds_keys = True

    @property
    def _attention(self) -> Any:
        return super(LinearAttentionCacheLayerMixin, self)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Allocate: attention calls with keys and values, a running state with keywords."""
        if args:
            self._attention.lazy_initialization(*args)
        else:
            PrefixRecurrentLayer.lazy_initialization(self, **kwargs)

    @property
    def rows(self) -> int | None:
        """Rows of the batch, or None while nothing is held."""
        rows: int | None = self._attention.rows
        return rows

    def check_rows(self, rows: int) -> None:
        """Raise `BatchSizeError` unless a batch of ``rows`` continues what is held."""
        self._attention.check_rows(rows)

    def check_room(self, added: int) -> None:
        """Raise `CacheCapacityError` unless ``added`` tokens fit behind those held."""
        self._attention.check_room(added)

    def check_load(self, state: RecurrentState, rows: int) -> None:
        """Raise unless `load` would work."""
        self._attention.check_load(state.attention, rows)

    def get_seq_length(self) -> int:
        """Return the tokens seen."""
        length: int = self._attention.get_seq_length()
        return length

    def seen(self) -> int:
        """Return the tokens seen, as a plain int."""
        length: int = self._attention.seen()
        return length

    def get_max_length(self) -> int:
        """Return the most tokens that the attention holds, -1 for any number."""
        length: int = self._attention.get_max_length()
        return length

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        held: list[torch.Tensor] = PrefixRecurrentLayer.tensors(self) + self._attention.tensors()
        return held

    def state(self) -> RecurrentState:
        """Return what is held, uncopied: for questions, not for keeping."""
        attention = self._attention.attention_state()
        return replace(PrefixRecurrentLayer.state(self), length=attention.length, attention=attention)

    def share(self) -> RecurrentState:
        """Return what is held, the running state as a copy."""
        copied = PrefixRecurrentLayer.share(self)
        return replace(copied, attention=self._attention.share())

    def load(self, state: RecurrentState, rows: int) -> None:
        """Hold ``state`` for a batch of ``rows``."""
        self._attention.load(state.attention, rows)
        PrefixRecurrentLayer.load(self, replace(state, attention=None), rows)

    def can_crop_to(self, length: int) -> bool:
        """Return whether both can keep the first ``length`` tokens."""
        attention: bool = self._attention.can_crop_to(length)
        return attention and PrefixRecurrentLayer.can_crop_to(self, length)

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens. Ask `can_crop_to` before."""
        PrefixRecurrentLayer.crop_to(self, length)
        self._attention.crop_to(length)

    def reset(self) -> None:
        """Forget everything."""
        PrefixRecurrentLayer.reset(self)
        self._attention.reset()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was."""
        PrefixRecurrentLayer.reorder_cache(self, beam_idx)
        self._attention.reorder_cache(beam_idx)

    def unshare(self) -> None:
        """Copy what the attention shares into own storage, with the next tokens."""
        self._attention.unshare()


class PrefixHybridLayer(HybridLayer, PrefixDynamicLayer):  # type: ignore[misc]
    """A running state beside full attention that grows."""

    is_compileable = False

    def __init__(self, number_of_states: int = 1) -> None:
        PrefixDynamicLayer.__init__(self)
        PrefixRecurrentLayer.__init__(self, number_of_states)


class PrefixHybridSlidingWindowLayer(HybridLayer, PrefixDynamicSlidingWindowLayer):  # type: ignore[misc]
    """A running state beside attention with a sliding window."""

    is_compileable = False

    def __init__(self, sliding_window: int, number_of_states: int = 1) -> None:
        PrefixDynamicSlidingWindowLayer.__init__(self, sliding_window)
        PrefixRecurrentLayer.__init__(self, number_of_states)
        self.window = sliding_window


class PrefixStaticHybridLayer(HybridLayer, PrefixStaticLayer):  # type: ignore[misc, override]
    """A running state beside full attention of fixed size."""

    def __init__(self, max_cache_len: int, number_of_states: int = 1) -> None:
        PrefixStaticLayer.__init__(self, max_cache_len=max_cache_len)
        PrefixRecurrentLayer.__init__(self, number_of_states)


class PrefixStaticHybridSlidingWindowLayer(HybridLayer, PrefixStaticSlidingWindowLayer):  # type: ignore[misc, override]
    """A running state beside attention of fixed size with a sliding window."""

    def __init__(self, max_cache_len: int, sliding_window: int, number_of_states: int = 1) -> None:
        PrefixStaticSlidingWindowLayer.__init__(self, max_cache_len=max_cache_len, sliding_window=sliding_window)
        PrefixRecurrentLayer.__init__(self, number_of_states)
        self.window = sliding_window
