"""The ``prefix-*`` names in ``generate``."""

from .call import given_prefix
from .reasons import computes_randomly
from .registration import register, unregister

__all__ = ["computes_randomly", "given_prefix", "register", "unregister"]
