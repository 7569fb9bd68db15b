"""Prefix caches: subclasses of Transformers' caches with snapshot, restore, fork and crop."""

from .base import PrefixCache, total_nbytes
from .dynamic import PrefixDynamicCache
from .offloaded import PrefixOffloadedCache
from .padding import PreparedInputs
from .quantized import PrefixQuantizedCache, QuantizationReport
from .static import PrefixStaticCache

__all__ = [
    "PrefixCache",
    "PrefixDynamicCache",
    "PrefixOffloadedCache",
    "PrefixQuantizedCache",
    "PrefixStaticCache",
    "PreparedInputs",
    "QuantizationReport",
    "total_nbytes",
]
