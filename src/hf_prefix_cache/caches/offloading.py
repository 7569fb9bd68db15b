"""What caches that hold something apart from the device do beside their layers: fetch ahead, reserve, undo."""

from __future__ import annotations

from typing import Any

import torch

from ..exceptions import OffloadError
from ..layers import LayerState, RecurrentState
from ..layers.scratch import Scratch
from ..layers.state import KeyValues
from ..layers.tiers import Tier
from ..snapshot import PrefixSnapshot
from .base import PrefixCache

__all__ = ["OffloadingCache"]


class OffloadingCache(PrefixCache):
    """A cache some of whose layers hold something apart from the device that computes."""

    _tier: Tier | None = None

    def _start_offloading(self, tier: Tier | None, scratch: Scratch) -> None:
        self._tier, self._scratch = tier, scratch
        self._streams: dict[torch.device, torch.cuda.Stream | None] = {}
        self._apart = [index for index, layer in enumerate(self.layers) if hasattr(layer, "bytes_due")]
        self._before = 0  # tokens held when the forward that runs began

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values ``[rows, heads, tokens, head_dim]`` of a layer and return all that may be attended to.

        Raises:
            BatchSizeError: The rows differ from those held.
            UnsupportedModelError: The layer cannot hold what the model adds.
            OffloadError: The folder has no room for what is added; nothing was changed.
        """
        if self._tier is None or layer_idx not in self._apart:
            result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        else:
            if layer_idx == self._apart[0]:
                self._before = self.layers[layer_idx].seen()
                self._reserve(key_states.shape[-2], KeyValues(key_states, value_states))
            try:
                result = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            except OffloadError:
                if self.can_crop_to(self._before):
                    self.crop_to(self._before)
                raise
            self._fetch_after(layer_idx)
            if layer_idx == self._apart[-1]:
                self._tier.settle()
        if self._apart and layer_idx == self._apart[-1]:
            self._scratch.release()  # the last layer's attention holds it as long as it needs it
        return result

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of keys that ``query_length`` further queries see, and the position of the first.

        Models ask this before any layer runs, so it is the last moment to find out that there is no room for what
        they will add.

        Raises:
            OffloadError: The folder has no room for that many tokens.
        """
        self._reserve(query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def load(self, snapshot: PrefixSnapshot, *, batch_size: int, allow_lossy: bool = False) -> None:
        """Put this cache at ``snapshot`` with ``batch_size`` rows, in place; see `PrefixCache.load`.

        Raises:
            OffloadError: The folder has no room for it; nothing was changed.
        """
        if self._tier is not None:
            states = zip(self.layers, snapshot.layers, strict=True)
            parts = [layer.bytes_to_load(_attention(state)) for layer, state in states if hasattr(layer, "bytes_due")]
            self._tier.reserve(sum(parts))
        try:
            super().load(snapshot, batch_size=batch_size, allow_lossy=allow_lossy)
        finally:
            if self._tier is not None:
                self._tier.settle()

    def _reserve(self, tokens: int, new: KeyValues | None = None) -> None:
        if self._tier is not None and self._tier.is_file:
            self._tier.reserve(sum(self.layers[index].bytes_due(tokens, new) for index in self._apart))

    def _fetch_after(self, layer_idx: int) -> None:
        following = (self.layers[index] for index in self._apart if index > layer_idx)
        ahead = next(following, None)
        if ahead is not None:
            ahead.fetch(self._stream(ahead.home))

    def _stream(self, device: torch.device) -> torch.cuda.Stream | None:
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)


def _attention(state: LayerState) -> Any:
    return state.attention if isinstance(state, RecurrentState) else state
