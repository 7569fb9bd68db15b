"""`PrefixOffloadedCache`: keys and values in host memory, on the device one layer at a time."""

from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..compat import decoder_config
from ..layers import DYNAMIC_KINDS
from ..layers.offloaded import PrefixOffloadedHybridLayer, PrefixOffloadedLayer
from ..snapshot import register_cache
from .base import attention_layers
from .dynamic import PrefixDynamicCache

__all__ = ["PrefixOffloadedCache"]


class PrefixOffloadedCache(PrefixDynamicCache):
    """A `PrefixDynamicCache` whose keys and values live in host memory, shared by all forks and snapshots.

    While a layer computes, the next one's keys and values are on their way to the device, on a stream of their own
    where the device has streams; of two layers at most is there anything on it. Windows and running states, which are
    small, stay on the device. Each layer comes to the device that its model part is on. Without a device beside the
    host, it is exactly a `PrefixDynamicCache`.

    Host memory is pinned where CUDA is. Results are exact.

    Args:
        config: Configuration of the model it is for.

    Raises:
        UnsupportedLayerError: The model has layers of a kind that is not held exactly.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig
        >>> hpc.PrefixOffloadedCache(config=LlamaConfig(num_hidden_layers=2)).get_seq_length()
        0
    """

    strategy = "prefix-offloaded"

    def __init__(self, *, config: PreTrainedConfig) -> None:
        kinds = {
            **DYNAMIC_KINDS,
            "full_attention": lambda spec: PrefixOffloadedLayer(),
            "hybrid": lambda spec: PrefixOffloadedHybridLayer(spec.states),
        }
        specs = attention_layers(config, type(self).__name__, kinds)
        layers: list[Any] = [kinds[spec.kind](spec) for spec in specs]
        Cache.__init__(self, layers=layers)
        self._config, self._options = decoder_config(config), {}
        self._streams: dict[torch.device, torch.cuda.Stream | None] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values ``[rows, heads, tokens, head_dim]`` of a layer and return all that may be attended to.

        Raises:
            BatchSizeError: The rows differ from those held.
            UnsupportedModelError: Inside `attend_shared`, the model did not hand the keys to Transformers' attention.
        """
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        following = (layer for layer in self.layers[layer_idx + 1 :] if isinstance(layer, PrefixOffloadedLayer))
        ahead = next(following, None)
        if ahead is not None:
            ahead.fetch(self._stream(ahead.home))
        return keys, values

    def unshare(self) -> None:
        """Do nothing: sharing is what keeps host memory small."""

    def _stream(self, device: torch.device) -> "torch.cuda.Stream | None":
        if device.type == "cuda" and device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        return self._streams.get(device)


register_cache(PrefixOffloadedCache.strategy, PrefixOffloadedCache)
