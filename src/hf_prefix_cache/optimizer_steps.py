"""Which parameters optimizers have changed: fused ones leave the parameters' version counters untouched."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["StepCount", "count_steps", "stepped_since"]

_total = 0
_by_optimizer: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


class StepCount(NamedTuple):
    """The steps of all optimizers of this process up to a moment.

    Attributes:
        total: Of all, also those that are gone.
        by_optimizer: Of each that is left.
    """

    total: int
    by_optimizer: weakref.WeakKeyDictionary[Optimizer, int]


def count_steps() -> StepCount:
    """Return the steps so far."""
    return StepCount(_total, weakref.WeakKeyDictionary(_by_optimizer))


def stepped_since(before: StepCount) -> set[int] | None:
    """Return the ids of the parameters that were stepped after ``before``, or None where nobody can tell."""
    if before.total == _total:
        return set()
    ids: set[int] = set()
    explained = 0
    for optimizer, steps in list(_by_optimizer.items()):
        more = steps - before.by_optimizer.get(optimizer, 0)
        if more:
            explained += more
            ids.update(id(parameter) for group in optimizer.param_groups for parameter in group["params"])
    return ids if explained == _total - before.total else None


def _count(optimizer: Optimizer, *_: Any) -> None:
    global _total
    _total += 1
    _by_optimizer[optimizer] = _by_optimizer.get(optimizer, 0) + 1


# This hook fires for all optimizers that are torch's own or derive from them, fused and 8-bit ones among them.
register_optimizer_step_post_hook(_count)
