"""`PrefixOffloadedCache`: keys and values in host memory or in files, on the device one layer at a time."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedConfig

from ..layers import DYNAMIC_KINDS
from ..layers.offloaded import PrefixOffloadedHybridLayer, PrefixOffloadedLayer
from ..layers.scratch import Scratch
from ..layers.tiers import make_tier
from ..snapshot import register_cache
from .dynamic import PrefixDynamicCache
from .offloading import OffloadingCache

__all__ = ["PrefixOffloadedCache"]


class PrefixOffloadedCache(OffloadingCache, PrefixDynamicCache):
    """A `PrefixDynamicCache` whose keys and values live in host memory or in files, shared by forks and snapshots.

    While a layer computes, the next one's keys and values are on their way to the device: on a stream of their own
    where the device has streams, read from a file by a thread. Of two layers at most is there anything on it. Windows
    and running states, which are small, stay on the device. Each layer comes to the device that its model part is on.
    Without a folder and without a device beside the host, it is exactly a `PrefixDynamicCache`.

    Host memory is pinned where CUDA is. Results are exact.

    Args:
        config: Configuration of the model it is for.
        offload_folder: A folder for files that keys and values are written to, and that are mapped into memory; None
            keeps them in host memory. The files have no name and are gone with the last cache or snapshot that needs
            them. The last tokens, a few in a hundred, stay in memory.

    Raises:
        UnsupportedLayerError: The model has layers of a kind that is not held exactly.
        OffloadError: The folder does not exist or cannot be written to.

    Example:
        >>> import tempfile, hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig
        >>> hpc.PrefixOffloadedCache(config=LlamaConfig(num_hidden_layers=2)).get_seq_length()
        0
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = hpc.PrefixOffloadedCache(config=LlamaConfig(num_hidden_layers=2), offload_folder=folder)
    """

    strategy = "prefix-offloaded"

    def __init__(self, *, config: PreTrainedConfig, offload_folder: str | os.PathLike[str] | None = None) -> None:
        tier, scratch = make_tier(offload_folder), Scratch()
        kinds: dict[str, Any] = {
            **DYNAMIC_KINDS,
            "full_attention": lambda spec: PrefixOffloadedLayer(tier, scratch),
            "hybrid": lambda spec: PrefixOffloadedHybridLayer(tier, scratch, spec.states),
        }
        self._make_layers(config, kinds)
        self._start_offloading(tier, scratch)
        self._options = {"offload_folder": offload_folder}

    def unshare(self) -> None:
        """Do nothing: sharing is what keeps memory small."""


register_cache(PrefixOffloadedCache.strategy, PrefixOffloadedCache)
