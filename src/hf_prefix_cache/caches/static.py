"""`PrefixStaticCache`: buffers of a fixed size and address, for compiled code."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, StaticCache

from ..architectures import why_no_static_cache
from ..attention import install
from ..compat import decoder_config
from ..exceptions import BatchSizeError, CacheCapacityError, UnsupportedModelError
from ..layers import STATIC_KINDS, AttentionState, PrefixStaticLayer
from ..snapshot import PrefixSnapshot, register_cache
from .base import PrefixCache, attention_layers

__all__ = ["PrefixStaticCache"]


class PrefixStaticCache(PrefixCache, StaticCache):
    """A `StaticCache` with snapshot, restore in place, fork and crop.

    All operations but `fork` keep the tensors' addresses, so compiled code stays valid. Batches smaller than the
    buffers use their first rows.

    Args:
        config: Configuration of the model it is for.
        max_cache_len: Tokens that it holds at most.
        max_batch_size: Rows that it holds at most; by default those of the first batch.

    Raises:
        UnsupportedLayerError: The model has layers of a kind that is not held exactly.
        UnsupportedModelError: The model is wrong on buffers of a fixed size.
        CacheCapacityError: ``max_cache_len`` is below 1.
        BatchSizeError: ``max_batch_size`` is below 1.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig
        >>> hpc.PrefixStaticCache(config=LlamaConfig(num_hidden_layers=2), max_cache_len=64).get_max_length()
        64
    """

    strategy = "prefix-static"

    def __init__(self, *, config: PreTrainedConfig, max_cache_len: int, max_batch_size: int | None = None) -> None:
        if max_cache_len < 1:
            raise CacheCapacityError(f"max_cache_len is {max_cache_len}; it must be at least 1")
        if max_batch_size is not None and max_batch_size < 1:
            raise BatchSizeError(f"max_batch_size is {max_batch_size}; it must be at least 1")
        obstacle = why_no_static_cache(config)
        if obstacle:
            raise UnsupportedModelError(
                f"PrefixStaticCache does not serve models of the type {decoder_config(config).model_type!r}: "
                f"{obstacle}; use prefix-dynamic"
            )
        specs = attention_layers(config, type(self).__name__, STATIC_KINDS)
        layers: list[Any] = [STATIC_KINDS[spec.kind](spec, max_cache_len) for spec in specs]
        for layer in layers:
            layer.max_batch_size = max_batch_size
        Cache.__init__(self, layers=layers)
        self._config = decoder_config(config)
        self._options = {"max_cache_len": max_cache_len, "max_batch_size": max_batch_size}

    @property
    def full_layers(self) -> list[PrefixStaticLayer]:
        """The layers that attend to all tokens; they hold equally many."""
        return [layer for layer in self.layers if isinstance(layer, PrefixStaticLayer)]

    @property
    def reach(self) -> int | None:
        """Places that full attention reads in compiled steps, from the first on; None for all of ``max_cache_len``.

        A forward that would write behind it raises `CacheCapacityError`.
        """
        return next((layer.reach for layer in self.full_layers), None)

    @reach.setter
    def reach(self, places: int | None) -> None:
        for layer in self.full_layers:
            layer.reach = places

    @contextmanager
    def reading_held(self) -> Iterator[None]:
        """Inside, hand attention what is held and not the room behind it, for forwards that are not compiled."""
        for layer in self.full_layers:
            layer.reads_held = True
        try:
            yield
        finally:
            for layer in self.full_layers:
                layer.reads_held, layer.apart = False, ()

    def attend_apart(self, snapshot: PrefixSnapshot) -> None:
        """Inside `reading_held`, let prompts behind ``snapshot``, loaded before, attend to its own tensors.

        Those need not be repeated for every row and grouped head, as the buffers are.
        """
        install()
        for layer, state in zip(self.layers, snapshot.layers, strict=True):
            if isinstance(layer, PrefixStaticLayer) and type(state) is AttentionState and layer.reads_held:
                layer.apart = state.segments


register_cache(PrefixStaticCache.strategy, PrefixStaticCache)
