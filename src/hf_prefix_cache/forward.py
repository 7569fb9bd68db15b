"""Feeding unpadded tokens to a model on a cache."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from .architectures import resumes_in_one_call
from .caches import PrefixCache, PrefixDynamicCache
from .compat import cache_argument, decoder_config, drops_cache, original_max_positions, takes_cache
from .exceptions import UnsupportedModelError
from .layers import KeptLayer, KeptState, PrefixRecurrentLayer, RecurrentState
from .snapshot import PrefixSnapshot
from .weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "cache_behind",
    "check_keeps_cache",
    "chunk_columns",
    "feed",
    "feed_prefix",
    "has_running_state",
    "next_token_logits",
    "takes_single_tokens",
]

# Tokens of a forward call: bounds the memory of activations, and is enough to keep the machine busy.
_CHUNK = 2048
# Columns of a chunk at least, however many rows there are: each chunk reads all weights.
_FEWEST_COLUMNS = 64


def cache_behind(prefix: PrefixSnapshot, rows: int) -> PrefixCache:
    """Return a cache that grows behind ``prefix``: own tokens are exact, also where the prefix is not."""
    if prefix.is_lossy and prefix.strategy == "prefix-quantized":
        return prefix.to_cache(batch_size=rows, quantize_own=False)
    return prefix.to_cache("prefix-dynamic", rows)


def check_keeps_cache(model: PreTrainedModel) -> None:
    """Raise `UnsupportedModelError` if ``model`` would run without the cache that it is given."""
    if drops_cache(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} is training with gradient (activation) checkpointing, where its layers silently "
            "drop the cache and with it the prefix; call model.eval(), or switch checkpointing off, around calls that "
            "reuse a prefix"
        )


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
        UnsupportedModelError: The model takes its cache by another name on this release, or checkpoints activations.
    """
    check_keeps_cache(model)
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


def feed_prefix(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: PrefixCache, *, chunk_size: int | None = None
) -> torch.Tensor:
    """Feed a prefix ``[1, tokens]``, a long one in chunks, and return the logits after it, ``[1, vocab]``.

    A cache that loses something gets the prefix when it is complete: within it, no token is computed from what an
    earlier chunk has lost.

    Args:
        model: The model; its mode (train or eval) is left as it is.
        input_ids: Tokens without padding.
        cache: Grows by them.
        chunk_size: Tokens per forward call; by default as many as bound the memory of activations.
    """
    held, tokens = cache.seq_length, input_ids.shape[1]
    size = chunk_size or chunk_columns(model, cache, rows=1, length=held + tokens)
    if not cache.is_lossy or held or size is None or tokens <= size:
        return feed(model, input_ids, cache, chunk_size=chunk_size if cache.is_lossy else size)
    exact = PrefixDynamicCache(config=model.config)
    logits = feed(model, input_ids, exact, chunk_size=size)
    cache.load(exact.snapshot(), batch_size=1)
    return logits


def chunk_columns(model: PreTrainedModel, cache: PrefixCache, *, rows: int, length: int) -> int | None:
    """Return the columns of ``rows`` rows to feed in one forward, or None where a prompt must go in whole.

    Args:
        model: The model.
        cache: What it is fed on.
        rows: Rows of the batch.
        length: Columns of the complete prompts.
    """
    limit = original_max_positions(model.config)
    if takes_single_tokens(model, cache) or (limit is not None and length > limit):
        return None
    return max(_FEWEST_COLUMNS, _CHUNK // rows)


def next_token_logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: PrefixCache) -> torch.Tensor:
    """Run one forward on ``cache`` and return the logits after the last token, ``[rows, vocab]``."""
    forward: Any = model.forward
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(forward).parameters else {}
    outputs = model(input_ids=input_ids, use_cache=True, return_dict=True, **keep, **cache_argument(cache))
    logits: torch.Tensor = outputs.logits[:, -1]
    return logits


def has_running_state(prefix: PrefixCache | PrefixSnapshot) -> bool:
    """Return whether a layer of ``prefix`` has a state that exists only after the last token (Mamba and its like)."""
    kept = (layer for layer in prefix.layers if isinstance(layer, KeptLayer | KeptState))
    return _has_recurrent_layers(prefix) or not all(layer.kind.is_croppable for layer in kept)


def takes_single_tokens(model: PreTrainedModel, prefix: PrefixCache | PrefixSnapshot) -> bool:
    """Return whether tokens behind ``prefix`` are right only one at a time (Mamba and its like)."""
    return _has_recurrent_layers(prefix) and not resumes_in_one_call(decoder_config(model.config))


def _has_recurrent_layers(prefix: PrefixCache | PrefixSnapshot) -> bool:
    return any(isinstance(layer, PrefixRecurrentLayer | RecurrentState) for layer in prefix.layers)
