"""A cache that holds the keys and values of one path of the token tree, from the root down."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..compat import layer_specs

__all__ = ["PATH_LAYERS", "TreeCache", "TreeLayer"]

# Layers that read another layer's keys. Before 5.24 a cache has no place for them, and such models are not packed.
_DUMMY_LAYER = getattr(cache_utils, "DummyLayer", None)
_ATTENTION = frozenset({"full_attention", "sliding_attention", "chunked_attention"})

PATH_LAYERS = _ATTENTION if _DUMMY_LAYER is None else _ATTENTION | {"dummy"}
"""Layer kinds whose whole state is the keys and values of single tokens, or that have none."""


class TreeLayer(DynamicLayer):
    """Keys and values of a path, ``[1, heads, path, head_dim]``, beside those of the tokens fed last.

    Unlike Transformers' sliding layers it drops nothing by itself: in a packed tree the order of rows says nothing
    about the distance of tokens, so windows are left to the mask.
    """

    def __init__(self, *, is_sliding: bool) -> None:
        super().__init__()
        self.is_sliding = is_sliding
        self._fresh: tuple[torch.Tensor, torch.Tensor] | None = None
        self._room: tuple[torch.Tensor, torch.Tensor] | None = None  # begins with the path

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of path and new tokens, ``[1, heads, path + new, head_dim]``; the path stays."""
        self._fresh = key_states, value_states
        if self.keys is None or self.values is None:
            return key_states, value_states
        held, total = self.keys.shape[-2], self.keys.shape[-2] + key_states.shape[-2]
        if self._room is None or self._room[0].shape[-2] < total:
            self._room = _with_room(self.keys, total), _with_room(self.values, total)
        for room, fresh in zip(self._room, self._fresh, strict=True):
            room[..., held:total, :] = fresh
        return self._room[0][..., :total, :], self._room[1][..., :total, :]

    def advance(self, kept: int, added: Sequence[slice]) -> None:
        """Make the path its first ``kept`` tokens and the ``added`` stretches of the tokens fed last."""
        fresh, self._fresh = self._fresh, None
        if fresh is None or (not added and kept == self.get_seq_length()):
            return
        if not added and not kept:
            self.reset()
            self._room = None
            return
        if self._room is None:
            # Concatenation copies, so nothing of the chunk is kept alive by what remains of it.
            keys, values = (torch.cat([part[..., stretch, :] for stretch in added], dim=-2) for part in fresh)
            self.keys, self.values, self.is_initialized = keys, values, True
            return
        for room, part in zip(self._room, fresh, strict=True):
            end = kept
            for stretch in added:
                begin, end = end, end + stretch.stop - stretch.start
                room[..., begin:end, :] = part[..., stretch, :]
        self.keys, self.values = self._room[0][..., :end, :], self._room[1][..., :end, :]


class TreeCache(DynamicCache):
    """The path above the chunk of the tree that a model is fed."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self._offsets: torch.Tensor | None = None
        self.layers = [
            _DUMMY_LAYER()
            if spec.kind == "dummy" and _DUMMY_LAYER is not None
            else TreeLayer(is_sliding=spec.kind in ("sliding_attention", "chunked_attention"))
            for spec in layer_specs(config)
        ]

    def place(self, depths: torch.Tensor | None) -> None:
        """Say at which ``depths``, ``[new]``, new tokens stand, to a model that counts from the cache's length."""
        self._offsets = None if depths is None else depths - torch.arange(len(depths), device=depths.device)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Return the path's length, or after `place` what added to 0, 1, 2 ... gives the new tokens' depths."""
        return super().get_seq_length(layer_idx) if self._offsets is None else self._offsets

    def advance(self, kept: int, added: Sequence[slice]) -> None:
        """Do `TreeLayer.advance` on every layer."""
        for layer in self.layers:
            if isinstance(layer, TreeLayer):
                layer.advance(kept, added)


def _with_room(path: torch.Tensor, total: int) -> torch.Tensor:
    """Return a tensor that begins with ``path`` and has places for ``total`` tokens."""
    room = path.new_empty(*path.shape[:-2], total, path.shape[-1])
    room[..., : path.shape[-2], :] = path
    return room
