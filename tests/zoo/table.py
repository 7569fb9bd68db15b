"""``python -m zoo.table``: check every architecture, and write docs/coverage.json and docs/coverage.md.

Names of architectures as arguments check those only; what is recorded of the others stays.
"""

from __future__ import annotations

import sys
import time
import warnings

import torch
import transformers

from .build import ARCHITECTURES
from .coverage import measure, release
from .markdown import markdown
from .record import RECORD, read_record, write_record

__all__ = ["main"]

_WRITE_EVERY = 10


def main(names: list[str]) -> None:
    """Measure ``names``, all by default, and write both files now and then: an interrupted run is of use, too."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    chosen = names or list(ARCHITECTURES)
    record = read_record()
    rows = record.setdefault(release(), {})
    if not names:
        for name in set(rows) - set(ARCHITECTURES):
            del rows[name]
    for place, name in enumerate(chosen, start=1):
        begun = time.perf_counter()
        rows[name] = measure(name)
        bad = [
            f"{strategy} {operation} {cell}"
            for strategy, operations in rows[name].get("cells", {}).items()
            for operation, cell in operations.items()
            if cell["outcome"] not in ("exact", "refused")
        ]
        print(f"{name} {time.perf_counter() - begun:.1f} s", rows[name].get("not_built", ""), *bad, sep="\n    ")
        if place % _WRITE_EVERY == 0 or place == len(chosen):
            write_record(record)
            RECORD.with_suffix(".md").write_text(markdown(record), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
