"""Attention computed once over what rows share (Hydragen; Juravsky et al., 2024)."""

from .interface import install, uninstall
from .shared import reference_attention, shared_prefix_attention

__all__ = ["install", "reference_attention", "shared_prefix_attention", "uninstall"]
