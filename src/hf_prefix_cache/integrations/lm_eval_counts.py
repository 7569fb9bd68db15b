"""Counting what the calls of an evaluation did, for its report."""

import torch

from ..report import GenerationReport
from ..scoring import ScoringReport, plan
from .lm_eval_report import TaskReport

__all__ = ["PromptCounts", "common_start", "scoring_counts"]


class PromptCounts:
    """The prompts of one task's generation, and what was computed of them."""

    def __init__(self) -> None:
        self.rows: list[list[int]] = []
        self.requested_tokens = 0
        self.computed_tokens = 0
        self.reasons: dict[str, None] = {}

    def add(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, report: GenerationReport) -> None:
        """Count one batch of prompts, both ``[rows, columns]``."""
        kept = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        self.rows += [ids[here.bool()].tolist() for ids, here in zip(input_ids, kept, strict=True)]
        self.requested_tokens += report.prompt_tokens
        self.computed_tokens += report.computed_tokens
        if report.reason:
            self.reasons[report.reason] = None

    def counts(self, task: str, requests: int) -> TaskReport:
        """Return the numbers of all batches."""
        # What a plan counts of a pair is all but its last token, which here is none of the prompt's.
        tree = plan([(row, [0]) for row in self.rows if row])
        return TaskReport(
            task,
            "generate_until",
            requests,
            requested_tokens=self.requested_tokens,
            grouped_tokens=self.requested_tokens,
            unique_tokens=tree.unique_tokens,
            computed_tokens=self.computed_tokens,
            note="; ".join(self.reasons),
        )


def scoring_counts(task: str, kind: str, requests: int, report: ScoringReport, *, root_tokens: int) -> TaskReport:
    """Return the numbers of one task's scoring.

    Args:
        task: The task's name.
        kind: The harness' request type.
        requests: Requests answered; a rolling one is several windows in ``report``.
        report: What scoring says.
        root_tokens: Tokens that all rows begin with.
    """
    return TaskReport(
        task,
        kind,
        requests,
        requested_tokens=report.requested_tokens,
        grouped_tokens=report.grouped_tokens,
        unique_tokens=report.unique_tokens,
        computed_tokens=report.computed_tokens,
        root_tokens=root_tokens,
        note="" if report.route == "packed" else f"scored by the {report.route} route: {report.route_reason}",
    )


def common_start(pairs: list[tuple[list[int], list[int]]]) -> int:
    """Return how many tokens the rows of all ``(context, continuation)`` begin with.

    Example:
        >>> common_start([([1, 2, 3], [4, 5]), ([1, 2, 3], [4, 6]), ([1, 2, 9], [7])])
        2
    """
    rows = [context + continuation[:-1] for context, continuation in pairs if continuation]
    if not rows:
        return 0
    # What the first and the last of all rows in order have in common, all rows have.
    first, last = min(rows), max(rows)
    return next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
