"""Scoring a table of requests in portions that each keep the prefixes of their rows together."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from tqdm import tqdm

from ..scoring import ScoringReport, last_scoring_report, loglikelihood
from ..scoring.model_access import length_limit
from ..scoring.requests import TokenRequests, fit_to_length
from ..scoring.tree import SortedRows, sort_rows
from ._requests import RequestTable
from .score_progress import ScoreProgress

__all__ = ["ScoringTotals", "cut_portions", "fit_table", "score_portions"]

PORTION_TOKENS = 2**15
"""Tokens of a portion at least: what an interruption loses at most, unless rows are very long."""
_ROWS = 32  # a portion is as long as this many rows at least, so that computing one path again costs some 3 %


@dataclass(frozen=True)
class ScoringTotals:
    """What a run asked for and computed.

    Attributes:
        requested_tokens: Tokens of the requests that this run scored, as plain rows.
        unique_tokens: Tokens of the prefix tree of all requests.
        computed_tokens: Tokens that were fed to the model.
        resumed_requests: Requests that an earlier run had scored already.
        route: How they were scored; empty if nothing was left.
        seconds: Time that scoring took.
    """

    requested_tokens: int
    unique_tokens: int
    computed_tokens: int
    resumed_requests: int
    route: str
    seconds: float


def fit_table(table: RequestTable, model: Any, *, truncate: bool) -> RequestTable:
    """Make bad lines of the requests that the model cannot read; with ``truncate``, shorten contexts first."""
    requests = table.requests
    vocabulary, limit = model.get_input_embeddings().weight.shape[0], length_limit(model.config)
    outside = np.flatnonzero(requests.tokens >= vocabulary)
    bad = {
        table.lines[index]: f"holds the token id {requests.tokens[place]}, but the model knows ids 0 to "
        f"{vocabulary - 1} only; encode the text with this model's own tokenizer"
        for place, index in zip(outside, np.searchsorted(requests.starts, outside, side="right") - 1, strict=True)
    }
    if limit is not None:
        surplus = np.maximum(requests.fed_lengths - limit, 0)
        too_long = requests.context_lengths - surplus < 1 if truncate else surplus > 0
        for index in np.flatnonzero(too_long & (surplus > 0)):
            needs = f"needs {requests.fed_lengths[index]:,} tokens, but the model reads at most {limit:,}"
            remedy = "its continuation alone is too long" if truncate else "--truncation left drops its first tokens"
            bad.setdefault(table.lines[index], f"{needs}; {remedy}")
    fitting = table.select(~np.isin(table.lines, list(bad)), bad)
    return RequestTable(fit_to_length(fitting.requests, limit, "left"), fitting.lines, fitting.bad)


def cut_portions(rows: SortedRows, size: int) -> Iterator[tuple[int, int]]:
    """Cut sorted rows into runs ``[start, stop)`` of about ``size`` distinct tokens.

    A run ends where the next row shares least with it, within its last quarter: that is what is computed again.
    """
    added = np.cumsum(rows.lengths - rows.shared)
    start, count = 0, len(added)
    while start < count:
        before = int(added[start - 1]) if start else 0
        limit = max(int(np.searchsorted(added, before + size, side="right")), start + 1)
        if limit < count:
            earliest = max(int(np.searchsorted(added, before + size - size // 4, side="right")), start + 1)
            candidates = np.arange(min(earliest, limit), limit + 1)[::-1]
            limit = int(candidates[np.argmin(rows.shared[candidates])])  # the last of equals
        yield start, limit
        start = limit


def score_portions(
    model: Any, requests: TokenRequests, progress: ScoreProgress, *, max_batch_tokens: int | None
) -> ScoringTotals:
    """Score what ``progress`` does not hold yet, and add it there portion by portion."""
    begun = time.perf_counter()
    resumed = len(progress.scores)
    rows = sort_rows(requests)
    added = rows.lengths - rows.shared
    size = max(PORTION_TOKENS, _ROWS * int(rows.lengths.max(initial=0)))
    # Cut from all requests, finished or not, so that a resumed run computes what an uninterrupted one does.
    portions = list(cut_portions(rows, size)) or [(0, 0)]
    requested, computed, route = 0, 0, ""
    with _token_bar(model, int(added.sum())) as settle:
        for start, stop in portions:
            # Requests without a row have nothing to score; they come with the first portion.
            chosen = (rows.row_of_request >= (start or -1)) & (rows.row_of_request < max(stop, 1))
            indices = np.flatnonzero(chosen).tolist()
            if not all(index in progress.scores for index in indices):
                pairs = _pairs(requests, indices)
                scores = loglikelihood(model, pairs, max_batch_tokens=max_batch_tokens, progress=False)
                progress.add(indices, scores)
                report = cast(ScoringReport, last_scoring_report(model))
                requested, computed = requested + report.requested_tokens, computed + report.computed_tokens
                route = report.route
            settle(int(added[:stop].sum()))
    return ScoringTotals(requested, int(added.sum()), computed, resumed, route, time.perf_counter() - begun)


def _pairs(requests: TokenRequests, indices: list[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for index in indices:
        start, stop = int(requests.starts[index]), int(requests.starts[index + 1])
        middle = start + int(requests.context_lengths[index])
        yield requests.tokens[start:middle], requests.tokens[middle:stop]


@contextmanager
def _token_bar(model: Any, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar that counts tokens as the model is fed them; the function it yields says how many are done."""
    with tqdm(total=total, unit=" tokens", unit_scale=True, desc="Scoring", disable=None) as bar:

        def count(*call: Any) -> None:
            # The self-check's sample and paths that are computed again are fed, too, but are not in the total.
            bar.update(min(call[-1]["input_ids"].numel(), total - bar.n))

        def settle(done: int) -> None:
            bar.update(done - bar.n)

        hook = model.register_forward_pre_hook(count, with_kwargs=True)
        try:
            yield settle
        finally:
            hook.remove()
