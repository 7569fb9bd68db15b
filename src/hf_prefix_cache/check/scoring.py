"""Scores of requests that branch around every split point, against uncached rows."""

from __future__ import annotations

from typing import Any

import torch

from ..oracle import Ids, Oracle
from ..scoring import last_scoring_report, loglikelihood
from .case import Findings
from .texts import Texts

__all__ = ["check_scoring"]

_CHUNK = 24  # tokens at once, so few that paths are carried from one chunk to the next


def check_scoring(model: Any, oracle: Oracle, texts: Texts, to: Findings) -> str:
    """Compare every token's log-probability; return how the requests were scored.

    The scorer's own check is off: it would hide a route that is wrong.
    """
    requests: list[tuple[Ids, Ids]] = []
    first, second, third = texts.streams
    for split in texts.splits:
        stem = texts.prefix[:split]
        requests += [(stem, first[:length]) for length in texts.suffixes]
        requests += [(stem, second[:7]), (stem + first[:2], third[:2]), (stem[: split // 2 + 1], third[:7])]
    scores = loglikelihood(model, requests, max_batch_tokens=_CHUNK, progress=False, self_check=False)
    for (context, continuation), score in zip(requests, scores, strict=True):
        logits = oracle.after(context[:-1], context[-1:] + continuation[:-1])
        right = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
        found = torch.tensor(score.token_logprobs)
        to.add(*oracle.judge(found[:, None], right[:, None], context[:-1], context[-1:] + continuation[:-1]))
    report = last_scoring_report(model)
    if report is None:
        return "scoring"
    if report.route_reason and report.route != "packed":
        to.notes[report.route_reason] = None
    return f"scoring ({report.route})"
