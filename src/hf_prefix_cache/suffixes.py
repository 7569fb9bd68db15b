"""Suffixes of unequal length behind one prefix, on models where padding cannot be masked exactly."""

from typing import Any

import torch
from transformers import PreTrainedModel

from .compat import CACHE_ARGUMENT, cache_argument
from .exceptions import UnsupportedModelError
from .snapshot import PrefixSnapshot

__all__ = ["forward_grouped"]


def forward_grouped(
    model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, prefix: PrefixSnapshot, **kwargs: Any
) -> Any:
    """Run rows unpadded behind ``prefix``, one forward for each length, and return one output for all.

    Args:
        model: The model.
        input_ids: Padded suffixes, ``[rows, tokens]``.
        mask: True at tokens, bool ``[rows, tokens]``.
        prefix: The prefix, of one row.
        **kwargs: Passed on to the model.

    Returns:
        The model's output with ``logits`` ``[rows, tokens, vocab]``, 0 at padding, and nothing else.

    Raises:
        UnsupportedModelError: A keyword asks for more than logits.
    """
    refused = sorted(name for name, value in kwargs.items() if value is not None and value is not False)
    if refused:
        raise UnsupportedModelError(
            f"padded rows run in groups on {type(model).__name__}, which gives logits only; leave out "
            f"{', '.join(refused)}, or pass rows of equal length without padding"
        )
    lengths = mask.sum(1)
    output, logits = None, None
    for length in sorted({int(value) for value in lengths}):
        rows = (lengths == length).nonzero()[:, 0]
        if not length:
            continue
        group = input_ids[rows][mask[rows]].reshape(len(rows), length)
        cache = prefix.to_cache("prefix-dynamic", batch_size=len(rows))
        output = model(input_ids=group, return_dict=True, **cache_argument(cache))
        if logits is None:
            logits = output.logits.new_zeros(*input_ids.shape, output.logits.shape[-1])
        where = torch.zeros_like(mask)
        where[rows] = mask[rows]
        logits[where] = output.logits.reshape(-1, output.logits.shape[-1])
    if output is None:
        raise UnsupportedModelError("attention_mask marks no token at all; pass at least one")
    output.logits = logits
    output[CACHE_ARGUMENT] = None
    return output
