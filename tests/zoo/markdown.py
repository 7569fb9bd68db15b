"""The coverage table in words, from its record."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from .record import newest

__all__ = ["STRATEGIES", "markdown", "standing"]

STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-quantized", "prefix-offloaded")
# By nature these are refused where a window or a running state has moved on: a model is served all the same.
_MAY_BE_REFUSED = ("crop", "padding")


def standing(row: dict[str, Any], strategy: str) -> str:
    """Return how an architecture fares with a strategy: exact, refused, or wrong."""
    cells = row["cells"][strategy]
    outcomes = {operation: cell["outcome"] for operation, cell in cells.items()}
    if any(outcome not in ("exact", "refused") for outcome in outcomes.values()):
        return "wrong"
    needed = [outcome for operation, outcome in outcomes.items() if operation not in _MAY_BE_REFUSED]
    return "exact" if all(outcome == "exact" for outcome in needed) else "refused"


def markdown(record: dict[str, dict[str, Any]]) -> str:
    """Return the table of all releases, the newest in full."""
    releases = newest(record)
    lines = [
        "# Coverage: every causal-LM architecture of Transformers",
        "",
        "Written by `make coverage-table`; do not edit. Each architecture is a tiny random model, float32 on a CPU, "
        "checked by `hpc.check` (its short form): prefixes are cut below and beyond every window, continued by 1, 2 "
        "and 7 tokens, and compared with the uncached model, row by row. *Exact* means within 1e-4, or within twice "
        "what plain Transformers deviates by where that is rounding. *Refused* means that a typed error says so and "
        "names what to use instead. `crop` and `padding` are refused by nature where a window or a running state has "
        "moved on; the standing of a strategy does not count that.",
        "",
    ]
    for name in releases:
        lines += _summary(name, record[name])
    lines += _architectures(releases[0], record[releases[0]])
    return "\n".join(lines) + "\n"


def _summary(name: str, rows: dict[str, Any]) -> list[str]:
    built = {key: row for key, row in rows.items() if "cells" in row}
    caching = {key: row for key, row in built.items() if not row["no_cache"]}
    lines = [
        f"## Transformers {name}",
        "",
        f"{len(rows)} architectures, {len(built)} of them built. {len(caching)} work with a prefix in a `Cache` of "
        f"Transformers and are counted here; the other {len(built) - len(caching)} are refused as a whole, by name.",
        "",
        "| strategy | architectures exact | refused | wrong | cells exact | refused | wrong |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for strategy in STRATEGIES:
        if not all(strategy in row["cells"] for row in caching.values()):
            lines.append(f"| {strategy} | not checked: its package was not installed | | | | | |")
            continue
        stands = Counter(standing(row, strategy) for row in caching.values())
        cells = Counter(cell["outcome"] for row in caching.values() for cell in row["cells"][strategy].values())
        wrong = sum(count for outcome, count in cells.items() if outcome not in ("exact", "refused"))
        lines.append(
            f"| {strategy} | {stands['exact']} | {stands['refused']} | {stands['wrong']} | {cells['exact']} | "
            f"{cells['refused']} | {wrong} |"
        )
    routes = Counter(row["cells"]["scoring"]["scores"].get("route", "") for row in built.values())
    scores = Counter(row["cells"]["scoring"]["scores"]["outcome"] for row in built.values())
    told = ", ".join(f"{count} {route}" for route, count in sorted(routes.items()))
    lines += ["", f"Scoring: {scores['exact']} of {len(built)} exact ({told}).", ""]
    return lines


def _architectures(name: str, rows: dict[str, Any]) -> list[str]:
    reasons: dict[str, int] = {}
    lines = [
        f"## Architectures (Transformers {name})",
        "",
        "A cell is the largest difference of logits; the operations that were refused follow, with the number of the "
        "reason below.",
        "",
        "| architecture | layer kinds | dynamic | static | quantized | offloaded | scoring |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for key, row in sorted(rows.items()):
        if "cells" not in row:
            continue
        if row["no_cache"]:
            number = reasons.setdefault(row["no_cache"], len(reasons) + 1)
            shown = [f"refused ({number})"] * len(STRATEGIES)
        else:
            shown = [_shown(row["cells"].get(strategy, {}), reasons) for strategy in STRATEGIES]
        score = row["cells"]["scoring"]["scores"]
        scoring = f"{score.get('route', '')} {_shown({'scores': score}, reasons)}".strip()
        lines.append(f"| {key} | {', '.join(row['kinds'])} | {' | '.join(shown)} | {scoring} |")
    lines += ["", "Reasons:", ""]
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    lines += ["", "Not built:", ""]
    lines += [f"- {key}: {row['not_built']}" for key, row in sorted(rows.items()) if "not_built" in row]
    return lines


def _shown(cells: dict[str, Any], reasons: dict[str, int]) -> str:
    deviations = [cell["deviation"] for cell in cells.values() if cell["outcome"] == "exact" and "deviation" in cell]
    parts = [f"{max(deviations):.0e}"] if deviations else []
    refused: dict[int, list[str]] = {}
    for operation, cell in cells.items():
        if cell["outcome"] != "exact":
            text = " ".join(_general(cell.get("error", cell["outcome"])).split())
            number = reasons.setdefault(text, len(reasons) + 1)
            word = operation if cell["outcome"] == "refused" else f"**{operation} {cell['outcome']}**"
            refused.setdefault(number, []).append(word)
    if cells and len(refused) == 1 and len(cells) == len(next(iter(refused.values()))):
        return f"refused ({next(iter(refused))})"
    return "; ".join([*parts, *(f"{', '.join(names)} ({number})" for number, names in refused.items())])


def _general(error: str) -> str:
    """Return the first of several refusals, without what differs between architectures."""
    text = error.split("; NotCroppableError")[0].split("; UnsupportedModelError")[0]
    for pattern, general in (
        (r"layer \d+ of \w+", "a layer"),
        (r"of the type '[^']*'", "of this type"),
        (r"Prefix\w+Cache does", "the cache does"),
        (r"from \d+ to \d+ tokens", "from a length to a shorter one"),
    ):
        text = re.sub(pattern, general, text)
    return text
