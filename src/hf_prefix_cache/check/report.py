"""What a check found."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["CheckCell", "CheckReport"]

_STYLES = {"exact": "green", "refused": "yellow", "wrong": "bold red", "failed": "bold red"}


@dataclass(frozen=True)
class CheckCell:
    """One operation on one strategy.

    Attributes:
        strategy: Name of the strategy; that of scoring is how it scored.
        operation: Name of the operation.
        outcome: ``"exact"``; ``"refused"`` where a typed error says that it is not done, and what to use instead;
            ``"wrong"`` where something else came out; ``"failed"`` where any other error was raised.
        deviation: The largest difference of logits from the uncached model, or None where nothing was compared.
        tolerance: What counts as rounding in that comparison.
        comparisons: How many rows were compared.
        error: Name and text of what was raised; beside ``"exact"``, what was refused at some of the split points.
        note: What else there is to say.

    Example:
        >>> CheckCell("prefix-dynamic", "fork", "exact", 2e-6, 1e-4, 12).is_right
        True
    """

    strategy: str
    operation: str
    outcome: str
    deviation: float | None
    tolerance: float
    comparisons: int
    error: str = ""
    note: str = ""

    @property
    def is_right(self) -> bool:
        """Whether it is exact or refused by name."""
        return self.outcome in ("exact", "refused")


@dataclass(frozen=True)
class CheckReport:
    """All that a check found. ``rich.print`` shows it as a table.

    Attributes:
        model: Class of the model.
        model_type: Its architecture.
        dtype: Type of its weights.
        device: Where it computed.
        versions: Releases of Transformers and PyTorch.
        splits: Lengths of the prefixes.
        suffixes: Lengths of what followed them.
        not_reached: Lengths past which the configuration says that the model works differently, and to which no text
            of this check came.
        cells: What was found, strategy by strategy.
        seconds: How long it took.

    Example:
        >>> sizes = dict(splits=(8,), suffixes=(1,), not_reached=(), seconds=0.1)
        >>> names = dict(model="LlamaForCausalLM", model_type="llama", dtype="float32", device="cpu", versions=())
        >>> CheckReport(**names, **sizes, cells=()).passed
        True
    """

    model: str
    model_type: str
    dtype: str
    device: str
    versions: tuple[tuple[str, str], ...]
    splits: tuple[int, ...]
    suffixes: tuple[int, ...]
    not_reached: tuple[int, ...]
    cells: tuple[CheckCell, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every cell is exact or refused by name."""
        return all(cell.is_right for cell in self.cells)

    @property
    def problems(self) -> tuple[CheckCell, ...]:
        """The cells that are neither."""
        return tuple(cell for cell in self.cells if not cell.is_right)

    def cell(self, strategy: str, operation: str) -> CheckCell:
        """Return one cell.

        Raises:
            KeyError: It was not checked.
        """
        for cell in self.cells:
            if (cell.strategy, cell.operation) == (strategy, operation):
                return cell
        raise KeyError(f"{operation!r} was not checked with {strategy!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON's types."""
        return {**asdict(self), "versions": dict(self.versions), "passed": self.passed}

    def __rich__(self) -> Table:
        """Return the table: a line for each operation, a column for each strategy."""
        from rich.table import Table

        versions = ", ".join(f"{name} {version}" for name, version in self.versions)
        table = Table(
            title=f"{self.model}, {self.dtype} on {self.device}; {versions}",
            caption=self._caption(),
            title_justify="left",
        )
        operations = list(dict.fromkeys(cell.operation for cell in self.cells))
        strategies = list(dict.fromkeys(cell.strategy for cell in self.cells))
        table.add_column("")
        for strategy in strategies:
            # In two lines, so that the table fits into a terminal.
            table.add_column(strategy.replace("prefix-", "prefix-\n").replace(" ", "\n"), justify="right")
        found = {(cell.strategy, cell.operation): cell for cell in self.cells}
        for operation in operations:
            shown = (found.get((strategy, operation)) for strategy in strategies)
            table.add_row(operation, *("" if cell is None else _shown(cell) for cell in shown))
        return table

    def _caption(self) -> str:
        lines = [
            "Largest difference of logits from the uncached model. Prefixes of "
            f"{', '.join(map(str, self.splits))} tokens, then {', '.join(map(str, self.suffixes))}; "
            f"{self.seconds:.0f} s."
        ]
        if any(cell.error and cell.outcome == "exact" for cell in self.cells):
            lines.append("*: where it is not refused.")
        if self.not_reached:
            lines.append(f"Not reached: {', '.join(map(str, self.not_reached))} tokens; pass a larger max_tokens.")
        return " ".join(lines)


def _shown(cell: CheckCell) -> str:
    text = cell.outcome
    if cell.outcome in ("exact", "wrong") and cell.deviation is not None:
        text = f"{cell.deviation:.0e}" + ("*" if cell.error else "")
    return f"[{_STYLES[cell.outcome]}]{text}[/]"
