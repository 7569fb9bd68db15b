"""Batched scoring: each token of the requests' prefix tree is computed once."""

from .encoding import encode_pairs
from .loglikelihood import loglikelihood
from .plan import PrefixNode, SharingPlan, plan
from .report import ScoringReport, SelfCheck, last_scoring_report
from .requests import ContinuationScore
from .rolling import loglikelihood_rolling

__all__ = [
    "ContinuationScore",
    "PrefixNode",
    "ScoringReport",
    "SelfCheck",
    "SharingPlan",
    "encode_pairs",
    "last_scoring_report",
    "loglikelihood",
    "loglikelihood_rolling",
    "plan",
]
