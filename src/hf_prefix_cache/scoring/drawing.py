"""Drawings of a `SharingPlan`: a tree of lines for the terminal and an icicle picture for a file."""

from pathlib import Path
from typing import TYPE_CHECKING

from ..exceptions import MissingPackageError

if TYPE_CHECKING:
    from .plan import PrefixNode, SharingPlan

__all__ = ["draw_tree", "save_picture"]


def draw_tree(plan: "SharingPlan", *, max_nodes: int, width: int) -> str:
    """Draw the heaviest stretches below each other, with a bar as long as the tokens they save.

    Args:
        plan: What to draw.
        max_nodes: Stretches shown at most; what is left out is counted beside its parent.
        width: Columns at most.

    Returns:
        Lines of text.

    Example:
        >>> from hf_prefix_cache.scoring import plan
        >>> print(plan([([1, 2, 3], [4, 5]), ([1, 2, 3], [6, 7]), ([1, 9], [9, 9])]).draw(width=60))
        3 requests · 11 tokens, 7 of them computed
        └─ 1 token × 3 requests  ██████████
           ├─ 2 tokens × 2 requests  ██████████
           │  └─ 2 requests on their own
           └─ 1 request on its own
    """
    shown = _with_ancestors(plan, max_nodes)
    children: dict[int, list[int]] = {}
    for place, node in enumerate(plan.nodes):
        children.setdefault(node.parent, []).append(place)
    tokens = f"{plan.grouped_tokens:,} tokens, {plan.unique_tokens:,} of them computed"
    lines = [f"{_count(plan.requests, 'request')} · {tokens}"]
    most = max((node.saved_tokens for node in plan.nodes), default=0)

    def add(parent: int, indent: str) -> None:
        below = children.get(parent, [])
        visible = sorted((p for p in below if p in shown), key=lambda p: -plan.nodes[p].saved_tokens)
        hidden = len(below) - len(visible)
        requests = plan.requests if parent < 0 else plan.nodes[parent].requests
        alone = requests - sum(plan.nodes[p].requests for p in below)
        rest = []
        if hidden:
            rest.append(f"{_count(hidden, 'smaller stretch', 'es')}")
        if alone:
            rest.append(f"{_count(alone, 'request')} on {'its' if alone == 1 else 'their'} own")
        entries: list[tuple[int | None, str]] = [(p, _label(plan.nodes[p], most)) for p in visible]
        if rest:
            entries.append((None, " and ".join(rest)))
        for number, (place, label) in enumerate(entries):
            last = number == len(entries) - 1
            lines.append(f"{indent}{'└─ ' if last else '├─ '}{label}")
            if place is not None:
                add(place, indent + ("   " if last else "│  "))

    add(-1, "")
    return "\n".join(line[:width] for line in lines)


def save_picture(plan: "SharingPlan", path: str | Path, *, title: str | None) -> None:
    """Save an icicle picture: every stretch of tokens once, as wide as it is long and as high as its rows."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError(
            "drawing a plan needs matplotlib; install it with: pip install matplotlib"
        ) from error
    # The figure is made without pyplot, so that no global state or display is touched.
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shared = [_box(n.start, n.end, n.first_row, n.first_row + n.rows) for n in plan.nodes]
    levels = [n.level for n in plan.nodes]
    covered = [0] * len(plan.row_lengths)
    for node in plan.nodes:  # parents first, so the deepest stretch over a row is the last to write
        covered[node.first_row : node.first_row + node.rows] = [node.end] * node.rows
    own = [_box(covered[row], length, row, row + 1) for row, length in enumerate(plan.row_lengths)]
    axes.add_collection(PolyCollection(own, facecolors="#d9d9d9", edgecolors="none"))
    colours = PolyCollection(shared, edgecolors="white", linewidths=0.3, cmap="viridis_r")
    colours.set_array(levels)
    colours.set_clim(0, max(levels, default=1) + 1)
    axes.add_collection(colours)
    axes.set_xlim(0, max(plan.longest_row, 1))
    axes.set_ylim(max(len(plan.row_lengths), 1), 0)
    axes.set_xlabel("tokens from the start of the request")
    axes.set_ylabel("distinct rows, sorted")
    summary = f"{plan.grouped_tokens:,} tokens, {plan.unique_tokens:,} distinct"
    axes.set_title(title or f"{summary}: {plan.ideal_speedup:.1f} times less to compute")
    figure.savefig(Path(path), dpi=150)


def _with_ancestors(plan: "SharingPlan", max_nodes: int) -> set[int]:
    shown: set[int] = set()
    for place in sorted(range(len(plan.nodes)), key=lambda p: -plan.nodes[p].saved_tokens):
        needed = set()
        while place >= 0 and place not in shown:
            needed.add(place)
            place = plan.nodes[place].parent
        if len(shown) + len(needed) > max_nodes:
            break
        shown |= needed
    return shown


def _label(node: "PrefixNode", most: int) -> str:
    bar = "█" * max(1, round(10 * node.saved_tokens / most)) if most else ""
    return (
        f"{_count(node.end - node.start, 'token')} \N{MULTIPLICATION SIGN} {_count(node.requests, 'request')}  {bar}"
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def _box(left: int, right: int, top: int, bottom: int) -> list[tuple[int, int]]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]
