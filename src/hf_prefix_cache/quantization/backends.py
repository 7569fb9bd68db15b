"""Choosing a backend by name, and trying it out before a cache relies on it."""

from collections.abc import Callable
from typing import Any

from ..exceptions import UnknownOptionError
from . import bitsandbytes_backend, hqq_backend
from .quantizer import Quantizer, Scheme

__all__ = ["BACKENDS", "make_scheme"]

_Make = Callable[[int, str | None, int | None], tuple[Quantizer, Quantizer]]

_MAKERS: dict[str, _Make] = {
    "bitsandbytes": bitsandbytes_backend.make_quantizers,
    "hqq": hqq_backend.make_quantizers,
}

BACKENDS = tuple(_MAKERS)
"""Names of the backends."""

# Further backends of Transformers' QuantizedCache: who asks for them is told what to use instead.
_ELSEWHERE = ("quanto", "fp8")


def make_scheme(
    *,
    backend: str,
    nbits: int,
    value_nbits: int | None = None,
    quant_type: str | None,
    group_size: int | None,
    residual_length: int,
    exact_first: int,
    exact_layers: tuple[int, ...] = (),
) -> Scheme:
    """Return how a cache of these options quantizes, after a trial of its backend.

    Raises:
        UnknownOptionError: A backend or value that does not exist.
        MissingPackageError: The backend's package is not installed, or not one that this version works with.
    """
    if backend in _ELSEWHERE:
        raise UnknownOptionError(
            f"backend is {backend!r}, which Transformers' QuantizedCache has but a prefix cache does not; use "
            f"{', '.join(map(repr, BACKENDS))}"
        )
    if backend not in _MAKERS:
        raise UnknownOptionError(f"backend is {backend!r}; the backends are {', '.join(map(repr, BACKENDS))}")
    for name, value in (("residual_length", residual_length), ("exact_first", exact_first)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UnknownOptionError(f"{name} is {value!r}; it is a number of tokens, an integer of 0 or more")
    make, bits = _MAKERS[backend], (nbits, nbits if value_nbits is None else value_nbits)
    # A format belongs to 4 bits: where only one of keys and values has as many, it is not meant for the other.
    formats = [quant_type if count == 4 or 4 not in bits else None for count in bits]
    made = [make(*each, group_size) for each in zip(bits, formats, strict=True)]
    keys, values = made[0][0], made[1][1]
    if keys.group_tokens != values.group_tokens:  # by default: keys and values of a token are quantized together
        longest = max(keys.group_tokens, values.group_tokens)
        made = [make(*each, longest) for each in zip(bits, formats, strict=True)]
        keys, values = made[0][0], made[1][1]
    options: dict[str, Any] = {"backend": backend, "nbits": nbits, "value_nbits": value_nbits}
    options |= {"quant_type": quant_type, "group_size": group_size, "residual_length": residual_length}
    options |= {"exact_first": exact_first, "exact_layers": exact_layers}
    return Scheme(backend, keys, values, residual_length, exact_first, exact_layers, options)
