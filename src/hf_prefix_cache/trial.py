"""What ``prefix-auto`` does with a model class that Transformers does not ship: it runs `check` before it trusts it.

The classes of Transformers are checked one by one, by the same code, for every release of this package
(docs/coverage.md); theirs is known, and costs nothing here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from .exceptions import CacheCapacityError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["try_own_class"]

# What is wrong with each model that was tried, in words; empty where nothing is.
_tried: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()


def try_own_class(model: PreTrainedModel) -> None:
    """Raise unless ``model`` is right behind a cached prefix; a model of Transformers' own classes is taken to be.

    It is tried once: some twenty forwards of a few tokens.

    Raises:
        UnsupportedModelError: Its logits behind a prefix differ from those without one, or it fails there.
    """
    if type(model).__module__.startswith("transformers."):
        return
    if model not in _tried:
        _tried[model] = _what_is_wrong(model)
    if _tried[model]:
        raise UnsupportedModelError(
            f"{type(model).__name__} is no class of Transformers and was tried out: behind a cached prefix "
            f"{_tried[model]}; leave cache_implementation out, and run hpc.check(model) for all that is wrong"
        )


def _what_is_wrong(model: PreTrainedModel) -> str:
    from .check import check  # it checks generate, too, and so is built on what asks for this trial

    try:
        report = check(
            model, strategies=["prefix-dynamic"], operations=["snapshot"], scoring=False, max_tokens=64, thorough=False
        )
    except CacheCapacityError:  # it reads too few tokens for a trial
        return ""
    for cell in report.problems:
        return (
            cell.error or f"its logits are off by {cell.deviation:.2g}, where rounding explains {cell.tolerance:.0e}"
        )
    return ""
