"""One store per model, made when it is first needed and freed with the model."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

import psutil
import torch

from ..adapters import unwrapped
from ..fingerprint import invalidate_fingerprint
from ..weights import input_device
from .prefix_store import PrefixStore

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["invalidate", "set_store", "store_for"]

_FREE_MEMORY_SHARE = 8  # a default store may take one eighth of what is free

_lock = threading.RLock()
_stores: weakref.WeakKeyDictionary[PreTrainedModel, PrefixStore] = weakref.WeakKeyDictionary()


def store_for(model: PreTrainedModel) -> PrefixStore:
    """Return the store of ``model``, made now if it has none.

    Its budget is one eighth of the memory that is free when it is made: of the accelerator's where the model is on
    one that tells, else of the machine's. The store goes when the model goes.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> hpc.store_for(model) is hpc.store_for(model)
        True
    """
    model = unwrapped(model)
    with _lock:
        store = _stores.get(model)
        if store is None:
            store = _stores[model] = PrefixStore(max_bytes=max(1, _free_bytes(model) // _FREE_MEMORY_SHARE))
        return store


def set_store(model: PreTrainedModel, store: PrefixStore) -> None:
    """Make ``store`` the store of ``model``. Models may share one: what they compute is never mixed up.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> hpc.set_store(model, hpc.PrefixStore(max_bytes=500_000_000))
        >>> hpc.store_for(model).max_bytes
        500000000
    """
    with _lock:
        _stores[unwrapped(model)] = store


def invalidate(model: PreTrainedModel) -> None:
    """Drop all that was computed with ``model``: for changes of its weights that nothing else shows.

    Its store is emptied. Models that share the store compute their prefixes anew.

    Example:
        >>> import torch, hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes))
        >>> model.lm_head.weight.data[3, 5] += 1  # a write of one value that no version counter shows
        >>> hpc.invalidate(model)
        >>> len(hpc.store_for(model))
        0
    """
    model = unwrapped(model)
    with _lock:
        store = _stores.get(model)
    known = invalidate_fingerprint(model)
    if store is not None:
        for fingerprint in known:  # in host memory and files, too
            store.discard(fingerprint)
        store.clear()


def _free_bytes(model: PreTrainedModel) -> int:
    """Return the bytes that are free where ``model`` is."""
    device = input_device(model)
    if device.type not in ("cpu", "meta"):
        ask = getattr(torch.get_device_module(device), "mem_get_info", None)
        if ask is not None:
            return int(ask(device)[0])
    return int(psutil.virtual_memory().available)
