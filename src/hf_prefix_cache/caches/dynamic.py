"""`PrefixDynamicCache`: grows in place, shares its prefix with snapshots and forks."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from ..attention import install
from ..compat import LayerSpec, decoder_config
from ..exceptions import UnsupportedModelError
from ..layers import DYNAMIC_KINDS
from ..layers.deferred import SharedPart
from ..snapshot import register_cache
from .base import PrefixCache, attention_layers

__all__ = ["PrefixDynamicCache"]


class PrefixDynamicCache(PrefixCache, DynamicCache):
    """A `DynamicCache` with snapshot, fork and crop.

    It grows in place with spare room instead of copying the past at every step, copy-on-write against snapshots and
    forks; with gradients on it concatenates, as Transformers does.

    Args:
        config: Configuration of the model it is for.

    Raises:
        UnsupportedLayerError: The model has layers of a kind that is not held exactly.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig
        >>> hpc.PrefixDynamicCache(config=LlamaConfig(num_hidden_layers=2)).get_seq_length()
        0
    """

    strategy = "prefix-dynamic"
    _deferred: SharedPart | None = None  # of the layer that ran last
    is_compileable = False  # Transformers would compile any subclass of DynamicCache whose layers allow it

    def __init__(self, *, config: PreTrainedConfig) -> None:
        self._make_layers(config, DYNAMIC_KINDS)
        self._options = {}

    def _make_layers(self, config: PreTrainedConfig, kinds: Mapping[str, Callable[[LayerSpec], Any]]) -> None:
        specs = attention_layers(config, type(self).__name__, kinds)
        Cache.__init__(self, layers=[kinds[spec.kind](spec) for spec in specs])
        self._config = decoder_config(config)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values ``[rows, heads, tokens, head_dim]`` of a layer and return all that may be attended to.

        Raises:
            BatchSizeError: The rows differ from those held.
            UnsupportedModelError: Inside `attend_shared`, the model did not hand the keys to Transformers' attention.
        """
        self._check_taken()
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._deferred = getattr(self.layers[layer_idx], "deferred", None)
        return keys, values

    @contextmanager
    def attend_shared(self) -> Iterator[None]:
        """Inside, let Transformers' ``sdpa`` attention see shared tokens ungathered, once for all rows.

        It is for models that hand keys from the cache straight to Transformers' attention interface; what cannot be
        computed that way exactly (windows, gradients, dropout, soft caps, sinks) is gathered as outside.
        """
        self.defer(True)
        try:
            yield
            self._check_taken()
        finally:
            self.defer(False)

    @property
    def shared_tokens(self) -> int:
        """Tokens that all rows share, stored once, in layers of full attention."""
        return max((getattr(layer, "shared_tokens", 0) for layer in self.layers if layer.is_sliceable), default=0)

    def defer(self, wanted: bool) -> None:
        """Begin or end what `attend_shared` does, where a ``with`` block does not fit."""
        if wanted:
            install()
        for layer in self.layers:
            if layer.is_sliceable:
                layer.defers, layer.deferred = wanted, None
        self._deferred = None

    def _check_taken(self) -> None:
        if self._deferred is not None and not self._deferred.is_taken:
            raise UnsupportedModelError(
                f"models of the type {self._config.model_type!r} do not hand their keys to Transformers' attention "
                "interface, so the shared prefix cannot be attended to apart; leave attend_shared out"
            )

    def unshare(self) -> None:
        """Copy what is shared with snapshots and forks into own storage, with the next token at the latest.

        Decoding then grows in place instead of gathering the shared prefix at every step: faster, for the memory
        of a plain cache.
        """
        for layer in self.layers:
            layer.unshare()


register_cache(PrefixDynamicCache.strategy, PrefixDynamicCache)
