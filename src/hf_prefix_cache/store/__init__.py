"""Computed prefixes, found by their tokens, within a budget of bytes."""

from .defaults import invalidate, set_store, store_for
from .prefix_store import PrefixStore
from .stats import StoreStats, TierStats

__all__ = ["PrefixStore", "StoreStats", "TierStats", "invalidate", "set_store", "store_for"]
