"""After ``generate``: keep the prompt and the generated tokens for later calls."""

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..compat import original_max_positions
from ..layers import AttentionState, KeyValues
from ..store import store_for
from .call import Call

__all__ = ["keep_rows"]


def keep_rows(model: PreTrainedModel, sequences: torch.Tensor, call: Call) -> None:
    """Store what each row of the call computed: its prompt and what it generated, but for tokens never fed.

    Args:
        model: The model.
        sequences: Prompts and generated tokens as ``generate`` returned them, ``[rows, columns]``.
        call: The call that has just ended.
    """
    cache = call.cache
    if cache is None or not call.options.reuse or not call.padding:
        return
    store, namespace = store_for(model), call.options.namespace
    if call.prompt is not None:
        store.insert(call.prompt, namespace)
    if not call.rows_continue or cache.rows != len(sequences):
        return
    held = cache.snapshot()
    limit = original_max_positions(model.config)
    for index, padding in enumerate(call.padding):
        tokens = _fed_tokens(sequences[index].cpu(), padding, held.seq_length, call)
        if limit is not None:
            tokens = tokens[:limit]
        row = replace(
            held,
            layers=tuple(_row(layer, index, call.shared, call.shared + padding) for layer in held.layers),
            seq_length=held.seq_length - padding,
            batch_size=1,
            fingerprint=call.fingerprint,
            padding_mask=None,
            input_ids=None,
        )
        if row.can_crop_to(len(tokens)):
            store.insert(replace(row.crop_to(len(tokens)), input_ids=tokens[None]), namespace)


def _fed_tokens(sequence: torch.Tensor, padding: int, held: int, call: Call) -> torch.Tensor:
    """Return the tokens of one row that the cache holds, without padding and without what follows its end."""
    fed = sequence[padding : min(held, len(sequence))]
    generated = fed[call.columns - padding :]
    ends = torch.isin(generated, call.end_ids).nonzero()
    return fed[: call.columns - padding + int(ends[0]) + 1] if len(ends) else fed


def _row(state: AttentionState, index: int, start: int, stop: int) -> AttentionState:
    """Return row ``index`` of ``state`` without its columns ``start`` to ``stop``; views."""
    segments, position = [], state.first
    for segment in state.segments:
        row = segment if segment.rows == 1 else KeyValues(*(tensor[index : index + 1] for tensor in segment))
        end = position + segment.tokens
        for first, last in ((position, min(end, start)), (max(position, stop), end)):
            if first < last:
                segments.append(row.slice(first - position, last - position))
        position = end
    return replace(state, segments=tuple(segments), length=state.length - (stop - start))
