"""Attention computed once over what rows share (Hydragen; Juravsky et al., 2024)."""

from .gate import is_worth_sharing
from .interface import install, uninstall
from .shared import reference_attention, shared_prefix_attention

__all__ = ["install", "is_worth_sharing", "reference_attention", "shared_prefix_attention", "uninstall"]
