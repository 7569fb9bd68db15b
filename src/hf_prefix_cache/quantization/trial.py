"""Trying out a backend's package before a cache relies on it."""

import importlib
from functools import lru_cache
from types import ModuleType

import torch

from ..exceptions import MissingPackageError
from .quantizer import Quantizer

__all__ = ["import_backend", "try_out"]


def import_backend(module: str, package: str) -> ModuleType:
    """Return a module of an optional package.

    Raises:
        MissingPackageError: It cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingPackageError(
            f"the backend {package!r} needs the package of that name, which cannot be imported ({error}); run "
            f"'pip install {package}'"
        ) from error


@lru_cache
def try_out(quantizer: Quantizer, package: str, version: str, tolerance: float) -> None:
    """Raise unless values from -1 to 1 come back within ``tolerance``, once for each release of the package.

    Raises:
        MissingPackageError: They do not, or the package raises.
    """
    unfit = (
        f"{package} {version} does not decode what this version of hf-prefix-cache encodes; install another release "
        "of it, or a newer hf-prefix-cache"
    )
    values = torch.sin(torch.arange(8 * quantizer.group_tokens, dtype=torch.float32))
    groups = values.view(1, 1, 2, quantizer.group_tokens, 4)
    decoded = torch.empty_like(groups)
    try:
        quantizer.dequantize(quantizer.quantize(groups), decoded)
        error = float((decoded - groups).abs().max())
    except Exception as failure:
        raise MissingPackageError(f"{unfit}: {failure}") from failure
    if not error <= tolerance:
        raise MissingPackageError(f"{unfit}: values from -1 to 1 come back with an error of {error:.2g}")
