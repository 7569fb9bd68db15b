"""Feeding unpadded tokens to a model on a cache."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from .caches import PrefixCache
from .compat import cache_argument, decoder_config, resumes_in_one_call, takes_cache
from .exceptions import UnsupportedModelError
from .layers import PrefixRecurrentLayer, RecurrentState
from .snapshot import PrefixSnapshot
from .weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["cache_behind", "feed", "has_running_state", "next_token_logits", "takes_single_tokens"]


def cache_behind(prefix: PrefixSnapshot, rows: int) -> PrefixCache:
    """Return a cache that grows behind ``prefix``: own tokens are exact, also where the prefix is not."""
    if prefix.is_lossy and prefix.strategy == "prefix-quantized":
        return prefix.to_cache(batch_size=rows, quantize_own=False)
    return prefix.to_cache("prefix-dynamic", rows)


def feed(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: PrefixCache, *, chunk_size: int | None = None
) -> torch.Tensor:
    """Feed ``input_ids`` behind what ``cache`` holds and return the logits after the last one, ``[rows, vocab]``.

    Args:
        model: The model; its mode (train or eval) is left as it is.
        input_ids: Tokens without padding, ``[rows, tokens]``.
        cache: Grows by them.
        chunk_size: Tokens per forward call; None feeds all at once.

    Raises:
        UnsupportedModelError: The model takes its cache by another name on this release.
    """
    if not takes_cache(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} takes its cache by a name of its own on this Transformers release, where "
            "prefixes cannot be reused with it; install transformers>=5.24"
        )
    ids = input_ids.to(input_device(model))
    while ids.shape[1]:
        size = 1 if cache.seq_length and takes_single_tokens(model, cache) else chunk_size or ids.shape[1]
        logits = next_token_logits(model, ids[:, :size], cache)
        ids = ids[:, size:]
    return logits


def next_token_logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: PrefixCache) -> torch.Tensor:
    """Run one forward on ``cache`` and return the logits after the last token, ``[rows, vocab]``."""
    forward: Any = model.forward
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(forward).parameters else {}
    outputs = model(input_ids=input_ids, use_cache=True, return_dict=True, **keep, **cache_argument(cache))
    logits: torch.Tensor = outputs.logits[:, -1]
    return logits


def has_running_state(prefix: PrefixCache | PrefixSnapshot) -> bool:
    """Return whether a layer of ``prefix`` has a running state (Mamba and its like)."""
    return any(isinstance(layer, PrefixRecurrentLayer | RecurrentState) for layer in prefix.layers)


def takes_single_tokens(model: PreTrainedModel, prefix: PrefixCache | PrefixSnapshot) -> bool:
    """Return whether tokens behind ``prefix`` are right only one at a time (Mamba and its like)."""
    return has_running_state(prefix) and not resumes_in_one_call(decoder_config(model.config))
