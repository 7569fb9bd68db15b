"""Feeding unpadded tokens to a model on a cache."""

import inspect

import torch
from transformers import PreTrainedModel

from .caches import PrefixCache
from .compat import cache_argument

__all__ = ["feed", "next_token_logits"]


def feed(
    model: PreTrainedModel, input_ids: torch.Tensor, cache: PrefixCache, *, chunk_size: int | None = None
) -> torch.Tensor:
    """Feed ``input_ids`` behind what ``cache`` holds and return the logits after the last one, ``[rows, vocab]``.

    Args:
        model: The model; its mode (train or eval) is left as it is.
        input_ids: Tokens without padding, ``[rows, tokens]``.
        cache: Grows by them.
        chunk_size: Tokens per forward call; None feeds all at once.
    """
    chunks = input_ids.to(model.device).split(chunk_size or input_ids.shape[1], dim=1)
    for chunk in chunks:
        logits = next_token_logits(model, chunk, cache)
    return logits


def next_token_logits(model: PreTrainedModel, input_ids: torch.Tensor, cache: PrefixCache) -> torch.Tensor:
    """Run one forward on ``cache`` and return the logits after the last token, ``[rows, vocab]``."""
    keep = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    outputs = model(input_ids=input_ids, use_cache=True, return_dict=True, **keep, **cache_argument(cache))
    logits: torch.Tensor = outputs.logits[:, -1]
    return logits
