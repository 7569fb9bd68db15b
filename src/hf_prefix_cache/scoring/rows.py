"""The plain route: every distinct row by itself, without a cache. Exact for every model; the measure of the others."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from ..compat import original_max_positions
from .chunk_size import BatchLimits
from .forward import read_forward
from .model_access import input_device
from .probes import Probes
from .requests import TokenRequests
from .tree import SortedRows

__all__ = ["score_rows", "settle_rotary_state"]


def score_rows(
    model: Any,
    requests: TokenRequests,
    rows: SortedRows,
    probes: Probes,
    *,
    limits: BatchLimits,
    on_tokens: Callable[[int], object],
) -> None:
    """Fill in ``probes`` by feeding every distinct row whole, in batches of equal length and so without padding.

    Args:
        model: Any causal language model, in evaluation mode.
        requests: The requests.
        rows: Their distinct rows.
        probes: What to read; filled in place.
        limits: Tokens and probed tokens of a batch at most, unless one row has more.
        on_tokens: Called with the number of tokens of each finished batch.
    """
    order = np.argsort(probes.rows, kind="stable")
    begins = np.searchsorted(probes.rows[order], np.arange(len(rows.lengths) + 1))
    device = input_device(model)
    settle_rotary_state(model, device)
    # Dynamic rotary scaling keeps the longest length it has seen, so shorter rows come first.
    for batch in _batches(rows, np.diff(begins), limits):
        length = int(rows.lengths[batch[0]])
        which = np.concatenate([order[begins[row] : begins[row + 1]] for row in batch])
        input_ids = requests.tokens[rows.starts[batch][:, None] + np.arange(length)]
        lines = np.repeat(np.arange(len(batch)), begins[batch + 1] - begins[batch])
        read_forward(model, input_ids, probes, which, lines, probes.depths[which], device=device)
        on_tokens(len(batch) * length)


def settle_rotary_state(model: Any, device: torch.device) -> None:
    """Make dynamic rotary scaling forget the lengths of earlier calls, as a freshly loaded model has not seen them."""
    if original_max_positions(model.config) is not None:
        model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), use_cache=False)


def _batches(rows: SortedRows, counts: np.ndarray, limits: BatchLimits) -> Iterator[np.ndarray]:
    by_length = np.argsort(rows.lengths, kind="stable")
    cuts = np.flatnonzero(np.diff(rows.lengths[by_length])) + 1
    for group in np.split(by_length, cuts) if len(by_length) else []:
        length = int(rows.lengths[group[0]])
        start = 0
        while start < len(group):
            stop = start + max(1, limits.max_tokens // length)
            # Logits are kept at every place that any row of the batch is probed at.
            widest = int(counts[group[start:stop]].max(initial=1))
            stop = min(stop, start + max(1, limits.max_probes // widest))
            yield group[start:stop]
            start = stop
