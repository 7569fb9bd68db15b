"""`PrefixDynamicCache`: grows in place, shares its prefix with snapshots and forks."""

from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, DynamicCache

from ..compat import decoder_config
from ..layers import DYNAMIC_KINDS
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
    is_compileable = False  # Transformers would compile any subclass of DynamicCache whose layers allow it

    def __init__(self, *, config: PreTrainedConfig) -> None:
        specs = attention_layers(config, type(self).__name__, DYNAMIC_KINDS)
        layers: list[Any] = [DYNAMIC_KINDS[spec.kind](spec) for spec in specs]
        Cache.__init__(self, layers=layers)
        self._config, self._options = decoder_config(config), {}

    def unshare(self) -> None:
        """Copy what is shared with snapshots and forks into own storage, with the next token at the latest.

        Decoding then grows in place instead of gathering the shared prefix at every step: faster, for the memory
        of a plain cache.
        """
        for layer in self.layers:
            layer.unshare()


register_cache(PrefixDynamicCache.strategy, PrefixDynamicCache)
