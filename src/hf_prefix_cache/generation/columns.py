"""Feeding some columns of a prompt the way ``generate`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..caches import PrefixCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["feed_columns"]


def feed_columns(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    cache: PrefixCache,
    model_kwargs: dict[str, Any],
    *,
    chunk_size: int | None,
) -> None:
    """Feed ``input_ids`` ``[rows, columns]`` behind what ``cache`` holds.

    Args:
        model: The model.
        input_ids: The columns that follow those in the cache.
        cache: The cache in ``model_kwargs``.
        model_kwargs: What ``generate`` passes to the model, mask and positions of cached columns included.
        chunk_size: Columns per forward; None feeds all at once.
    """
    generator: Any = model
    for chunk in input_ids.split(chunk_size or input_ids.shape[1], dim=1):
        kwargs, start = dict(model_kwargs), cache.seq_length
        stop = start + chunk.shape[1]
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"][:, :stop]
        if kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = kwargs["position_ids"][..., start:stop]
        model(**generator.prepare_inputs_for_generation(chunk, is_first_iteration=True, **kwargs), return_dict=True)
