"""Compute a prompt prefix once, then use it exactly, everywhere in Hugging Face Transformers."""

from .caches import PrefixDynamicCache, PrefixStaticCache, total_nbytes
from .exceptions import *  # noqa: F403
from .snapshot import PrefixSnapshot

__all__ = ["PrefixDynamicCache", "PrefixSnapshot", "PrefixStaticCache", "total_nbytes"]
