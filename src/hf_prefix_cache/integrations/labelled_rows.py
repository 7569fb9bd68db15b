"""The rows of an ordinary labelled data set, collated as `transformers.Trainer` does and without their padding."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset

from ..compat import decoder_config
from ..exceptions import InputMismatchError
from ..scoring.model_access import innermost_model, uncompiled_model

__all__ = ["IGNORED", "LabelledRow", "labelled_rows"]

IGNORED = -100
"""The label of tokens that do not count, as in Transformers' losses."""

_KNOWN = frozenset({"input_ids", "attention_mask", "labels", "position_ids"})


class LabelledRow(NamedTuple):
    """One row of a data set, cut at its first and behind its last label.

    Attributes:
        context: Tokens before the first label, ``[context]``, int32; empty in a row without labels.
        continuation: Tokens from the first to the last label, ``[continuation]``, int32.
        is_labelled: Which of these count, ``[continuation]``, bool.
        first_is_labelled: Whether the row's very first token has a label too, which nothing can predict.
    """

    context: np.ndarray
    continuation: np.ndarray
    is_labelled: np.ndarray
    first_is_labelled: bool


def labelled_rows(
    model: Any, dataset: Any, *, data_collator: Callable[[list[Any]], Any] | None, batch_size: int
) -> list[LabelledRow]:
    """Read a data set in its order, without the columns that the model's forward does not take.

    Args:
        model: The model that the rows are for; nothing is computed.
        dataset: Rows with ``input_ids`` and ``labels``, or whatever ``data_collator`` makes them of.
        data_collator: Makes one padded batch of a list of rows; None to take the rows as they are.
        batch_size: Rows that it is given at once.

    Raises:
        InputMismatchError: If the data set is empty, or a row cannot be scored as `transformers.Trainer` would; the
            message names its index.
    """
    if batch_size < 1:
        raise InputMismatchError(f"per_device_eval_batch_size is {batch_size}, but a batch has at least 1 row")
    forward = innermost_model(uncompiled_model(model)).forward
    columns = {*inspect.signature(forward).parameters, "labels", "label", "label_ids"}
    # Rotary positions only count differences, so that padding before a row changes nothing.
    may_shift = bool(getattr(decoder_config(model.config), "rope_parameters", None))
    rows: list[LabelledRow] = []
    unread = _rows_of(dataset)
    while features := list(islice(unread, batch_size)):
        kept = [_without_others(feature, columns, len(rows) + place) for place, feature in enumerate(features)]
        collated = kept if data_collator is None else _split(data_collator(kept), len(kept), len(rows))
        for row in collated:
            rows.append(_labelled_row(row, len(rows), may_shift))
    if not rows:
        raise InputMismatchError("the data set has no rows; a loss needs at least one")
    return rows


def _rows_of(dataset: Any) -> Iterator[Any]:
    # A map-style data set of torch need not raise the IndexError by which Python's own iteration would end.
    if hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):
        return (dataset[index] for index in range(len(dataset)))
    return iter(dataset)


def _without_others(feature: Any, columns: set[str], index: int) -> dict[str, Any]:
    if not isinstance(feature, Mapping):
        raise InputMismatchError(
            f"row {index} is of type {type(feature).__name__}; rows are dictionaries with input_ids and labels"
        )
    return {name: value for name, value in feature.items() if name in columns}


def _split(batch: Any, rows: int, first: int) -> list[dict[str, Any]]:
    batch = dict(batch)
    for name, values in batch.items():
        if not hasattr(values, "__len__") or len(values) != rows:
            raise InputMismatchError(
                f"data_collator made {name!r} of {len(values) if hasattr(values, '__len__') else 'no'} rows out of "
                f"the {rows} rows from {first} on; one that keeps rows apart is needed, such as DataCollatorForSeq2Seq"
            )
    return [{name: values[place] for name, values in batch.items()} for place in range(rows)]


def _labelled_row(row: Mapping[str, Any], index: int, may_shift: bool) -> LabelledRow:
    others = sorted(set(row) - _KNOWN)
    if others:
        raise InputMismatchError(
            f"row {index} holds {others[0]!r}, which changes what the model computes; a loss with shared prefixes "
            f"takes {', '.join(sorted(_KNOWN))} only"
        )
    for name in ("input_ids", "labels"):
        if row.get(name) is None:
            raise InputMismatchError(
                f"row {index} has no {name}; pass the data_collator that makes them, such as "
                "DataCollatorForLanguageModeling(tokenizer, mlm=False)"
            )
    parts = {name: _integers(values, name, index) for name, values in row.items() if values is not None}
    ids = parts["input_ids"]
    for name, values in parts.items():
        if len(values) != len(ids):
            raise InputMismatchError(f"row {index} has {len(ids)} input_ids but {len(values)} {name}")
    labels = parts["labels"]
    start, stop = _unpadded(parts, index, may_shift)
    ids, labels = ids[start:stop], labels[start:stop]
    wrong = np.flatnonzero((labels != ids) & (labels != IGNORED))
    if len(wrong):
        place = int(wrong[0])
        raise InputMismatchError(
            f"row {index} has the label {labels[place]} for its token {start + place}, which is {ids[place]}; a label "
            f"is its own token's id or {IGNORED}"
        )
    counted = labels != IGNORED
    places = np.flatnonzero(counted[1:]) + 1
    first_is_labelled = bool(counted[:1].any())
    if not len(places):
        empty = np.zeros(0, dtype=np.int32)
        return LabelledRow(empty, empty, np.zeros(0, dtype=bool), first_is_labelled)
    begin, end = int(places[0]), int(places[-1]) + 1
    ids = ids.astype(np.int32)
    return LabelledRow(ids[:begin], ids[begin:end], counted[begin:end], first_is_labelled)


def _unpadded(parts: Mapping[str, np.ndarray], index: int, may_shift: bool) -> tuple[int, int]:
    """Return where the tokens that are no padding begin and end."""
    labels, positions = parts["labels"], parts.get("position_ids")
    mask = parts.get("attention_mask", np.ones(len(labels), dtype=np.int64)) != 0
    places = np.flatnonzero(mask)
    start, stop = (int(places[0]), int(places[-1]) + 1) if len(places) else (0, 0)
    if not mask[start:stop].all():
        raise InputMismatchError(f"row {index} has padding between its tokens; only its ends may be padded")
    if (labels[~mask] != IGNORED).any():
        raise InputMismatchError(f"row {index} has labels where its attention_mask is 0; make them {IGNORED}")
    if positions is not None and not np.array_equal(positions[start:stop], np.arange(stop - start)):
        raise InputMismatchError(
            f"row {index} has position_ids that do not count its tokens from 0; rows that are packed into one cannot "
            "share prefixes, so pass them one by one"
        )
    if start and labels[start] != IGNORED:
        raise InputMismatchError(
            f"row {index} is padded on the left and its first token has a label, which would be predicted from "
            f"padding; make that label {IGNORED} or pad on the right"
        )
    if start and positions is None and not may_shift:
        raise InputMismatchError(
            f"row {index} is padded on the left, by which this model gives its tokens other positions; pad on the "
            "right, or add position_ids that count from 0"
        )
    return start, stop


def _integers(values: Any, name: str, index: int) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if isinstance(values, torch.Tensor) else values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "biu"):
        raise InputMismatchError(
            f"the {name} of row {index} are {array.dtype} of shape {list(array.shape)}; they have to be a flat list "
            "of integers"
        )
    return array.astype(np.int64)
