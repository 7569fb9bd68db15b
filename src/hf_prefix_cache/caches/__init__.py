"""Prefix caches: subclasses of Transformers' caches with snapshot, restore, fork and crop."""

from .base import PreparedInputs, PrefixCache, total_nbytes
from .dynamic import PrefixDynamicCache
from .static import PrefixStaticCache

__all__ = ["PrefixCache", "PrefixDynamicCache", "PrefixStaticCache", "PreparedInputs", "total_nbytes"]
