"""Attention computed once over what rows share (Hydragen; Juravsky et al., 2024)."""

from .gate import Gate, is_worth_apart, sharing_gate
from .interface import install, uninstall
from .shared import reference_attention, shared_prefix_attention

__all__ = ["Gate", "install", "is_worth_apart", "reference_attention", "shared_prefix_attention", "sharing_gate"]
__all__ += ["uninstall"]
