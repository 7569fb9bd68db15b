"""Compute a prompt prefix once, then use it exactly, everywhere in Hugging Face Transformers."""

from . import exceptions
from .caches import (
    PrefixCache,
    PrefixDynamicCache,
    PrefixOffloadedCache,
    PrefixQuantizedCache,
    PrefixStaticCache,
    PreparedInputs,
    QuantizationReport,
    total_nbytes,
)
from .check import CheckCell, CheckReport, check
from .conversation import Branch, Mark
from .exceptions import *  # noqa: F403 - every error is public, and listed in exceptions.__all__
from .fingerprint import fingerprint_of
from .generation import Warmup, register, unregister, warmup
from .layers import forget_layer_kind, register_layer_kind
from .model import PrefixCachedModel
from .quantization import QuantizationError
from .report import GenerationReport, last_report
from .scoring import (
    ContinuationScore,
    PrefixNode,
    ScoringReport,
    SelfCheck,
    SharingPlan,
    encode_pairs,
    last_scoring_report,
    loglikelihood,
    loglikelihood_rolling,
    plan,
)
from .snapshot import PrefixSnapshot
from .store import PrefixStore, StoreStats, TierStats, invalidate, set_store, store_for
from .strategy import StrategyChoice, choose_strategy

__all__ = [
    "Branch",
    "CheckCell",
    "CheckReport",
    "ContinuationScore",
    "GenerationReport",
    "Mark",
    "PrefixCache",
    "PrefixCachedModel",
    "PrefixDynamicCache",
    "PrefixNode",
    "PrefixOffloadedCache",
    "PrefixQuantizedCache",
    "PrefixSnapshot",
    "PrefixStaticCache",
    "PrefixStore",
    "PreparedInputs",
    "QuantizationError",
    "QuantizationReport",
    "ScoringReport",
    "SelfCheck",
    "SharingPlan",
    "StoreStats",
    "StrategyChoice",
    "TierStats",
    "Warmup",
    "check",
    "choose_strategy",
    "encode_pairs",
    "fingerprint_of",
    "forget_layer_kind",
    "invalidate",
    "last_report",
    "last_scoring_report",
    "loglikelihood",
    "loglikelihood_rolling",
    "plan",
    "register",
    "register_layer_kind",
    "set_store",
    "store_for",
    "total_nbytes",
    "unregister",
    "warmup",
    *exceptions.__all__,
]

register()
