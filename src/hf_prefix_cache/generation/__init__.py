"""The ``prefix-*`` names in ``generate``."""

from .call import given_prefix
from .registration import register, unregister

__all__ = ["given_prefix", "register", "unregister"]
