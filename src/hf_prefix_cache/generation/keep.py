"""Keeping what a call computed for later calls, one row at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..compat import decoder_config
from ..forward import has_running_state, takes_single_tokens
from ..layers import KeptState, RecurrentState
from ..layers.quantized_state import quantized
from ..snapshot import PrefixSnapshot
from ..store import store_for
from .batch import PromptBatch
from .call import Call
from .columns import feed_columns

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["keep_before_last", "keep_rows"]


def keep_before_last(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    unfed: torch.Tensor,
    model_kwargs: dict[str, Any],
    call: Call,
    *,
    chunk_size: int | None,
    windows: bool = False,
) -> torch.Tensor:
    """Keep the prompts without their last token, where nothing shorter can be taken from what is kept later.

    A running state exists only where it was kept. With one a token before the end, a prompt that is asked again is
    computed from there: its last token is always fed, for the logits that generation starts from.

    Args:
        model: The model.
        input_ids: Complete prompts, ``[rows, columns]``.
        unfed: Those of its columns that the cache does not hold yet.
        model_kwargs: What ``generate`` passes to the model.
        call: The call.
        chunk_size: Columns per forward; None feeds all at once.
        windows: Whether windows move on too before the prompts are kept.

    Returns:
        What of ``unfed`` is left to feed.
    """
    cache, batch = call.cache, call.batch
    if cache is None or batch is None or call.is_own_cache or batch.is_padded or not call.options.reuse:
        return unfed
    moves_on = windows and not all(layer.is_sliceable for layer in cache.layers)
    if batch.columns < 2 or not (moves_on or has_running_state(cache)):
        return unfed
    rest = unfed[:, -1:]
    if unfed.shape[1] > 1:
        chunk_size = None if takes_single_tokens(model, cache) else chunk_size
        feed_columns(model, unfed[:, :-1], cache, model_kwargs, chunk_size=chunk_size)
    keep_rows(model, input_ids[:, :-1], call)
    return rest


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
    has_state = any(isinstance(layer, RecurrentState | KeptState) for layer in layers)
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
