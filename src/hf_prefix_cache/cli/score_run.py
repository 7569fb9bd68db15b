"""Scoring a table of requests in portions that each keep the prefixes of their rows together."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from ..scoring import last_scoring_report, loglikelihood
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
        requested_tokens: Tokens of the requests it scored, as plain rows.
        unique_tokens: Tokens of their prefix tree.
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
    left = np.asarray([index not in progress.scores for index in range(len(requests))], dtype=bool)
    indices, requests = np.flatnonzero(left), requests.select(left)
    rows = sort_rows(requests)
    unique, requested, computed, route = int((rows.lengths - rows.shared).sum()), 0, 0, ""
    size = max(PORTION_TOKENS, _ROWS * int(rows.lengths.max(initial=0)))
    with _token_bar(model, unique) as settle:
        for start, stop in cut_portions(rows, size) if len(rows.lengths) else [(0, 0)]:
            # Requests without a row have nothing to score; they come with the first portion.
            first = start if start else -1
            chosen = (rows.row_of_request >= first) & (rows.row_of_request < stop)
            part = requests.select(chosen)
            scores = loglikelihood(model, _pairs(part), max_batch_tokens=max_batch_tokens, progress=False)
            progress.add(indices[chosen].tolist(), scores)
            report = last_scoring_report(model)
            if report is not None:
                requested, computed = requested + report.requested_tokens, computed + report.computed_tokens
                route = report.route
            settle(int((rows.lengths - rows.shared)[:stop].sum()))
    return ScoringTotals(requested, unique, computed, resumed, route, time.perf_counter() - begun)


def _pairs(requests: TokenRequests) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for start, stop, context in zip(
        requests.starts[:-1].tolist(), requests.starts[1:].tolist(), requests.context_lengths.tolist(), strict=True
    ):
        yield requests.tokens[start : start + context], requests.tokens[start + context : stop]


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
