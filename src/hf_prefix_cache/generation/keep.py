"""Keeping what a call computed for later calls, one row at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..compat import decoder_config
from ..layers import RecurrentState
from ..layers.quantized_state import quantized
from ..snapshot import PrefixSnapshot
from ..store import store_for
from .batch import PromptBatch
from .call import Call

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["keep_rows"]


def keep_rows(
    model: PreTrainedModel, sequences: torch.Tensor, call: Call, *, next_logits: torch.Tensor | None = None
) -> None:
    """Store what the call's cache holds of each row: its prompt and what was generated, but for tokens never fed.

    Args:
        model: The model.
        sequences: Prompts, and generated tokens if there are any, in the order of the cache's rows,
            ``[rows, columns]``.
        call: The call, whose cache holds the first of those columns.
        next_logits: Logits after the last column, ``[rows, vocab]``, where the cache holds all columns.
    """
    cache, batch = call.cache, call.batch
    if cache is None or batch is None or cache.rows != len(sequences) or not call.options.reuse:
        return
    store, config = store_for(model), decoder_config(model.config)
    held = min(cache.seq_length, call.kept_columns or cache.seq_length)
    # Views of the cache's own tensors: the store copies what it does not hold yet.
    layers = [layer.state().detach() for layer in cache.layers]
    has_state = any(isinstance(layer, RecurrentState) for layer in layers)
    for index, padding in enumerate(batch.padding):
        if padding and has_state:
            continue  # padding went through the state, masked as the model masks it: nothing to build on
        tokens = _fed_tokens(sequences[index, :held].cpu(), padding, batch, call.end_ids)
        row = PrefixSnapshot(
            layers=tuple(quantized(layer.row(index, call.shared, call.shared + padding)) for layer in layers),
            seq_length=cache.seq_length - padding,
            batch_size=1,
            strategy=call.strategy,
            config=config,
            fingerprint=call.fingerprint,
            is_lossy=cache.is_lossy,
        )
        if row.can_crop_to(len(tokens)):
            logits = None if next_logits is None else next_logits[index : index + 1].detach()
            row = replace(row.crop_to(len(tokens)), input_ids=tokens[None], next_logits=logits)
            store.insert(row, call.options.namespace)


def _fed_tokens(sequence: torch.Tensor, padding: int, batch: PromptBatch, end_ids: torch.Tensor) -> torch.Tensor:
    """Return the tokens of a row, of which all columns were fed, without padding and without what follows its end."""
    ends = torch.isin(sequence[batch.columns :], end_ids).nonzero()
    stop = batch.columns + int(ends[0]) + 1 if len(ends) else len(sequence)
    return sequence[padding:stop]
