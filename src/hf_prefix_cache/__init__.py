"""Compute a prompt prefix once, then use it exactly, everywhere in Hugging Face Transformers."""

from . import exceptions
from .caches import PrefixCache, PrefixDynamicCache, PrefixStaticCache, PreparedInputs, total_nbytes
from .exceptions import *  # noqa: F403 - every error is public, and listed in exceptions.__all__
from .generation import register, unregister
from .model import PrefixCachedModel
from .report import GenerationReport, last_report
from .snapshot import PrefixSnapshot
from .store import PrefixStore, StoreStats, invalidate, set_store, store_for
from .strategy import StrategyChoice, choose_strategy

__all__ = [
    "GenerationReport",
    "PrefixCache",
    "PrefixCachedModel",
    "PrefixDynamicCache",
    "PrefixSnapshot",
    "PrefixStaticCache",
    "PrefixStore",
    "PreparedInputs",
    "StoreStats",
    "StrategyChoice",
    "choose_strategy",
    "invalidate",
    "last_report",
    "register",
    "set_store",
    "store_for",
    "total_nbytes",
    "unregister",
    *exceptions.__all__,
]

register()
