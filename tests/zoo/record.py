"""The recorded coverage of both ends of the supported range, and what it is to be worse."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

__all__ = ["RECORD", "RIGHT", "newest", "read_record", "recorded_rows", "worse_cells", "write_record"]

RECORD = Path(__file__).parents[2] / "docs" / "coverage.json"
RIGHT = {"exact": 2, "refused": 1}
"""Outcomes that are allowed, the better one higher."""


def read_record() -> dict[str, dict[str, Any]]:
    """Return what is recorded, by release and architecture; empty where nothing is."""
    if not RECORD.exists():
        return {}
    stored = json.loads(RECORD.read_text(encoding="utf-8"))
    record = {}
    for release, table in stored.items():
        record[release] = table["architectures"]
        for cell in _cells(record[release]):
            if "error" in cell:
                cell["error"] = table["errors"][cell["error"]]
    return record


def write_record(record: dict[str, dict[str, Any]]) -> None:
    """Write the record, sorted, a line for each architecture; what errors say stands apart, once."""
    parts = []
    for release in newest(record):
        rows = copy.deepcopy(record[release])
        errors: dict[str, int] = {}
        for cell in _cells(rows):
            if "error" in cell:
                cell["error"] = errors.setdefault(cell["error"], len(errors))
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows[name], sort_keys=True)}" for name in sorted(rows))
        listed = ",\n".join(json.dumps(error) for error in errors)
        parts.append(f'{json.dumps(release)}: {{"errors": [\n{listed}\n],\n"architectures": {{\n{lines}\n}}}}')
    RECORD.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def _cells(rows: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        cell
        for name in sorted(rows)
        for operations in rows[name].get("cells", {}).values()
        for cell in operations.values()
    ]


def newest(record: dict[str, Any]) -> list[str]:
    """Return the recorded releases, the newest first."""
    return sorted(record, key=_numbers, reverse=True)


def recorded_rows(record: dict[str, Any], release: str) -> dict[str, Any]:
    """Return what is recorded for ``release``; of one that is not, what is for the last before it, else the first."""
    known = newest(record)
    return record[next((name for name in known if _numbers(name) <= _numbers(release)), known[-1])]


def _numbers(release: str) -> list[int]:
    return [int(part) for part in release.split(".")]


def worse_cells(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the cells of an architecture that got worse, and those that are wrong."""
    if "cells" not in now:
        return ["it is not built any more"] if "cells" in before else []
    found = []
    for strategy, operations in now["cells"].items():
        for operation, cell in operations.items():
            rank = RIGHT.get(cell["outcome"], 0)
            earlier = before.get("cells", {}).get(strategy, {}).get(operation, {}).get("outcome", "refused")
            if rank < RIGHT.get(earlier, 1):
                found.append(f"{strategy} {operation}: {earlier} before, now {cell}")
    return found
