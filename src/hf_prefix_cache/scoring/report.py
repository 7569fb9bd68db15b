"""What the last scoring call asked for, computed and reused."""

import weakref
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ScoringReport", "SelfCheck", "last_scoring_report", "remember_report"]

_reports: "weakref.WeakKeyDictionary[torch.nn.Module, ScoringReport]" = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class SelfCheck:
    """How the first-use comparison with the plain route went.

    Attributes:
        outcome: ``"passed"``, ``"failed"``, ``"off"`` (switched off) or ``"not needed"`` (the plain route ran anyway).
        lengths: Lengths of the longest rows compared: a short one, and one past each threshold that requests reach.
        largest_difference: Largest difference of one token's log-probability; None if nothing was compared.
        judged_difference: The difference that was held against ``tolerance``, at the length where it is largest: the
            largest one; in half precision, which rounds single values far apart, the mean.
        tolerance: What is allowed (see `TOLERANCES`); None if nothing was compared.
        reason: Why it failed, in words; empty otherwise.

    Example:
        >>> SelfCheck("off").lengths
        ()
    """

    outcome: str
    lengths: tuple[int, ...] = ()
    largest_difference: float | None = None
    judged_difference: float | None = None
    tolerance: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class ScoringReport:
    """The numbers of one call of `loglikelihood`.

    Attributes:
        requests: Requests scored.
        requested_tokens: Tokens of all requests as plain rows.
        grouped_tokens: Tokens with lm-evaluation-harness' one-token grouping.
        unique_tokens: Tokens of the prefix tree.
        computed_tokens: Tokens that were fed to the model (without the self-check's).
        route: ``"packed"``, ``"forked"`` or ``"rows"``: how most requests were scored.
        route_reason: Why, in words.
        plain_requests: Requests scored as plain rows because another route is not exact for their length.
        self_check: How the self-check went.
        seconds: Time of the whole call.
        attention: On an accelerator, the way of attention measured to be fastest for the last packed chunk, and what
            each way took; empty elsewhere.

    Example:
        >>> report = ScoringReport(4, 400, 300, 100, 100, "packed", "all attention", 0, SelfCheck("passed"), 1.0)
        >>> report.reused_tokens, report.ideal_ratio, report.reached_ratio
        (300, 3.0, 3.0)
    """

    requests: int
    requested_tokens: int
    grouped_tokens: int
    unique_tokens: int
    computed_tokens: int
    route: str
    route_reason: str
    plain_requests: int
    self_check: SelfCheck
    seconds: float
    attention: str = ""

    @property
    def reused_tokens(self) -> int:
        """Tokens that plain rows would have computed once more."""
        return self.requested_tokens - self.computed_tokens

    @property
    def ideal_ratio(self) -> float:
        """Grouped tokens over tokens of the tree."""
        return self.grouped_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @property
    def reached_ratio(self) -> float:
        """Grouped tokens over tokens computed."""
        return self.grouped_tokens / self.computed_tokens if self.computed_tokens else 1.0

    def __str__(self) -> str:
        return (
            f"{self.requests:,} requests: {self.requested_tokens:,} tokens asked for, {self.computed_tokens:,} "
            f"computed, {self.reused_tokens:,} reused; {self.reached_ratio:.2f} of ideally {self.ideal_ratio:.2f} "
            f"times less than with one-token grouping; route {self.route} ({self.route_reason}); self-check "
            f"{self.self_check.outcome}; {self.seconds:.1f} s"
        )


def last_scoring_report(model: Any) -> ScoringReport | None:
    """Return the report of the last scoring call with ``model``, or None if there was none.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hf_prefix_cache.scoring import loglikelihood
        >>> sizes = dict(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> _ = loglikelihood(model, [([1, 2, 3], [4, 5]), ([1, 2, 3], [6, 7])], progress=False)
        >>> report = last_scoring_report(model)
        >>> report.requested_tokens, report.computed_tokens, report.route
        (8, 5, 'packed')
    """
    return _reports.get(model)


def remember_report(model: Any, report: ScoringReport) -> None:
    """Keep ``report`` for as long as ``model`` lives."""
    _reports[model] = report
