"""What an architecture of the zoo gives, as a row of the coverage table."""

from __future__ import annotations

from typing import Any

import transformers

import hf_prefix_cache as hpc
from hf_prefix_cache.architectures import why_no_cache
from hf_prefix_cache.compat import layer_specs

from .build import CannotBuildError, build_architecture
from .markdown import STRATEGIES

__all__ = ["measure", "release"]


def release() -> str:
    """Return the installed release of Transformers, as the record names it."""
    return ".".join(transformers.__version__.split(".")[:2])


def measure(name: str, strategies: tuple[str, ...] = STRATEGIES) -> dict[str, Any]:
    """Return what one architecture gives: its layer kinds and cells, or why it was not built."""
    try:
        model = build_architecture(name)
    except CannotBuildError as error:
        return {"not_built": str(error)}
    kinds: dict[str, None] = dict.fromkeys(spec.kind for spec in layer_specs(model.config))
    report = hpc.check(model, strategies=strategies, thorough=False)
    cells: dict[str, dict[str, Any]] = {}
    for cell in report.cells:
        if cell.error.startswith("MissingPackageError"):
            continue  # says nothing of the architecture
        strategy = "scoring" if cell.operation == "scores" else cell.strategy
        found: dict[str, Any] = {"outcome": cell.outcome}
        if cell.deviation is not None:
            found["deviation"] = float(f"{cell.deviation:.0e}")
        if cell.error:
            found["error"] = cell.error
        if strategy == "scoring":
            found["route"] = cell.strategy.removeprefix("scoring").strip(" ()")
        cells.setdefault(strategy, {})[cell.operation] = found
    return {
        "class": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "kinds": list(kinds),
        "no_cache": why_no_cache(model.config),
        "seconds": round(report.seconds, 1),
        "cells": cells,
    }
