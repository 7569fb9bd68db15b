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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of path and new tokens, ``[1, heads, path + new, head_dim]``; the path stays."""
        self._fresh = key_states, value_states
        if self.keys is None or self.values is None:
            return key_states, value_states
        return torch.cat([self.keys, key_states], dim=-2), torch.cat([self.values, value_states], dim=-2)

    def advance(self, kept: int, added: Sequence[slice]) -> None:
        """Make the path its first ``kept`` tokens and the ``added`` stretches of the tokens fed last."""
        fresh, self._fresh = self._fresh, None
        if fresh is None or (not added and kept == self.get_seq_length()):
            return
        if not added and not kept:
            self.reset()
            return
        self.keys = _joined(self.keys, kept, fresh[0], added)
        self.values = _joined(self.values, kept, fresh[1], added)
        self.is_initialized = True


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


def _joined(path: torch.Tensor | None, kept: int, fresh: torch.Tensor, added: Sequence[slice]) -> torch.Tensor:
    # Concatenation copies, so nothing of the longer path or of the chunk is kept alive by what remains of it.
    pieces = [fresh[..., stretch, :] for stretch in added]
    return torch.cat(pieces if path is None else [path[..., :kept, :], *pieces], dim=-2)
