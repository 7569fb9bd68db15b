"""Attention layers with a sliding or chunked window in buffers of a fixed size, for compiled code."""

from typing import Any

import torch
from transformers.cache_utils import StaticSlidingWindowLayer

from .state import AttentionState
from .static import StaticRows

__all__ = ["PrefixStaticSlidingWindowLayer"]


class PrefixStaticSlidingWindowLayer(StaticRows, StaticSlidingWindowLayer):
    """A layer of fixed size with a sliding window or chunk.

    The buffers hold one token more than the next one attends to, so that the last token can always be taken back.
    Compiled decode steps ask tensors alone how much is held: one graph serves every length, while Transformers' layer,
    which branches on a number, is compiled again for each.
    """

    def __init__(self, max_cache_len: int, sliding_window: int) -> None:
        # Tokens seen, in the window and before; and the same as a number, None after compiled code, which keeps none.
        self._seen: int | None = 0
        with torch.inference_mode(False):
            self._total = torch.tensor(0, dtype=torch.long)
            StaticSlidingWindowLayer.__init__(self, max_cache_len=max_cache_len, sliding_window=sliding_window)
        self.window = sliding_window
        self.total_len = max_cache_len
        self._held_from = 0  # position of the first token that may be used

    @property
    def is_croppable(self) -> bool:  # type: ignore[override]
        """Whether every token stays in the window, so that any crop can be undone."""
        return self.total_len <= self.max_cache_len

    @property
    def cumulative_length_int(self) -> int:
        """Tokens seen, under the name that Transformers' sliding layers use."""
        return self.seen()

    @cumulative_length_int.setter
    def cumulative_length_int(self, value: int) -> None:
        self._seen = value
        self._total.fill_(value)

    def seen(self) -> int:
        """Return the tokens seen, as a plain int."""
        if self._seen is None:
            self._seen = int(self._total)
        return self._seen

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers, with ``max_batch_size`` rows where that was asked for."""
        super().lazy_initialization(key_states, value_states)
        with torch.inference_mode(False):
            self._total = self._total.to(self.keys.device)
        if not torch.compiler.is_compiling():
            torch._dynamo.mark_static_address(self._total)

    def write(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write tokens that fit; return what their queries may attend to."""
        size = self.max_cache_len
        if not torch.compiler.is_compiling() or key_states.shape[-2] != 1:
            was_full = self.seen() >= size
            result = super().write(key_states, value_states, *args, **kwargs)
            if not was_full and self.seen() >= size:
                self.cumulative_length.fill_(size)  # Transformers leaves it where the window is filled at once
            return result
        # A full window moves up by one, with its oldest token overwritten.
        moved = (torch.arange(size, device=self.keys.device) + (self.cumulative_length >= size)) % size
        position = self.cumulative_length.clamp(max=size - 1).reshape(1)
        for buffer, new in ((self.keys, key_states), (self.values, value_states)):
            buffer.copy_(buffer.index_select(-2, moved).index_copy(-2, position, new))
        self.cumulative_length.add_(1).clamp_(max=size)
        self._total.add_(1)
        self._seen = None
        return self.keys, self.values

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens, in place."""
        first = self.attention_state().first
        removed = self.seen() - length
        if removed and self.seen() > self.max_cache_len:
            # The window is full and stays full: its tokens move up. What moves in at the front is out of the window.
            for buffer in (self.keys.detach(), self.values.detach()):
                buffer.copy_(buffer.roll(removed, dims=-2))
        self.set_length(length)
        self._held_from = first if length else 0

    def set_length(self, length: int) -> None:
        """Set the number of tokens seen, in place."""
        self.cumulative_length_int = length
        self.cumulative_length.fill_(min(length, self.max_cache_len))
        self._held_from = 0

    def lost(self) -> int:
        """Return how many of the tokens in the buffers, at the front, are not to be used."""
        return max(0, self._held_from - (self.seen() - self.held()))

    def load(self, state: AttentionState, rows: int) -> None:
        """Copy the end of ``state`` into the buffers for a batch of ``rows``; their addresses stay."""
        super().load(state, rows)
        self._held_from = state.first
