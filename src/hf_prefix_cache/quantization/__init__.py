"""Backends that turn keys and values into few bits and back, behind one small interface."""

from .backends import BACKENDS, make_scheme
from .error import QuantizationError
from .quantizer import Quantizer, Scheme

__all__ = ["BACKENDS", "QuantizationError", "Quantizer", "Scheme", "make_scheme"]
