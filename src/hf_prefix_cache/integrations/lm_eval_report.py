"""What an evaluation asked for, computed and reused, task by task."""

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["PrefixReport", "TaskReport", "last_prefix_report", "remember_prefix_report"]

_COLUMNS = ("requests", "requested", "computed", "reused", "ideal", "reached")


@dataclass(frozen=True)
class TaskReport:
    """The numbers of one task's requests of one kind, on this process.

    Attributes:
        task: The task's name.
        kind: The harness' request type: ``"loglikelihood"``, ``"loglikelihood_rolling"`` or ``"generate_until"``.
        requests: Requests answered.
        requested_tokens: Tokens that they hold, each request by itself; of generation, those of the prompts.
        grouped_tokens: Tokens that `HFLM` computes: with its one-token grouping, padding not counted.
        unique_tokens: Tokens of the requests' prefix tree: what has to be computed at least.
        computed_tokens: Tokens that were computed.
        root_tokens: Tokens that all requests of a ``"loglikelihood"`` task begin with; each process computes them.
        note: What stood in the way of reuse, in words; empty where nothing did.

    Example:
        >>> report = TaskReport(
        ...     "arc", "loglikelihood", 4, requested_tokens=90, grouped_tokens=60, unique_tokens=20, computed_tokens=20
        ... )
        >>> report.reused_tokens, report.reached_ratio
        (70, 3.0)
    """

    task: str
    kind: str
    requests: int
    requested_tokens: int
    grouped_tokens: int
    unique_tokens: int
    computed_tokens: int
    root_tokens: int = 0
    note: str = ""

    @property
    def reused_tokens(self) -> int:
        """Tokens that were asked for and did not have to be computed again."""
        return self.requested_tokens - self.computed_tokens

    @property
    def ideal_ratio(self) -> float:
        """How many times fewer tokens than `HFLM` sharing could compute."""
        return self.grouped_tokens / self.unique_tokens if self.unique_tokens else 1.0

    @property
    def reached_ratio(self) -> float:
        """How many times fewer tokens than `HFLM` were computed."""
        return self.grouped_tokens / self.computed_tokens if self.computed_tokens else 1.0


@dataclass(frozen=True)
class PrefixReport:
    """The numbers of each task's last run on one process. Its text is a table.

    Attributes:
        tasks: One entry for each task and kind of request.
        rank: The process.
        processes: How many there are; the harness deals the documents out to them.
        own_code: Why `HFLM`'s own code ran, whose tokens are not counted; empty where it did not.

    Example:
        >>> arc = TaskReport(
        ...     "arc", "loglikelihood", 4, requested_tokens=90, grouped_tokens=60, unique_tokens=20, computed_tokens=20
        ... )
        >>> print(PrefixReport((arc,)))
        tokens with hf-prefix    requests    requested     computed       reused    ideal  reached
        arc                             4           90           20           70    3.00x    3.00x
    """

    tasks: tuple[TaskReport, ...]
    rank: int = 0
    processes: int = 1
    own_code: str = ""

    @property
    def total(self) -> TaskReport:
        """All tasks together."""
        names = ("requests", "requested_tokens", "grouped_tokens", "unique_tokens", "computed_tokens", "root_tokens")
        sums = {name: sum(getattr(task, name) for task in self.tasks) for name in names}
        return TaskReport("all", "all", **sums)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON knows them."""
        return {
            "rank": self.rank,
            "processes": self.processes,
            "own_code": self.own_code,
            "tasks": [_as_dict(task) for task in self.tasks],
            "total": _as_dict(self.total),
        }

    def __str__(self) -> str:
        shown = (*self.tasks, self.total) if len(self.tasks) > 1 else self.tasks
        names = {id(task): _name(task) for task in shown}
        width = max([len("tokens with hf-prefix"), *map(len, names.values())]) + 2
        lines = [f"{'tokens with hf-prefix':{width}}" + "".join(_cells(*_COLUMNS))]
        for task in shown:
            numbers = (task.requests, task.requested_tokens, task.computed_tokens, task.reused_tokens)
            ratios = (task.ideal_ratio, task.reached_ratio)
            lines.append(
                f"{names[id(task)]:{width}}" + _cells(*(f"{n:,}" for n in numbers), *(f"{r:.2f}x" for r in ratios))
            )
        lines += [f"{_name(task)}: {task.note}" for task in self.tasks if task.note]
        if self.own_code:
            lines.append(f"HFLM's own code ran, without sharing prefixes, because {self.own_code}")
        if self.processes > 1:
            lines.append(
                f"rank {self.rank} of {self.processes}, the requests dealt out to it alone; every rank computes what "
                f"all requests of a task begin with, here {self.total.root_tokens:,} tokens"
            )
        return "\n".join(lines)


def last_prefix_report() -> PrefixReport | None:
    """Return the report of the model that ran last, or None before any did.

    For evaluations that make their model themselves, as ``lm_eval.simple_evaluate(model="hf-prefix")`` does; they
    also find it in ``results["config"]["prefix_report"]``.

    Example:
        >>> report = last_prefix_report()
        >>> report is None or report.total.requested_tokens >= 0
        True
    """
    return _last[-1] if _last else None


def remember_prefix_report(report: PrefixReport) -> None:
    """Make ``report`` the last one."""
    _last[:] = [report]


_last: list[PrefixReport] = []


def _name(task: TaskReport) -> str:
    return task.task if task.kind in ("loglikelihood", "all") else f"{task.task} ({task.kind})"


def _cells(requests: str, requested: str, computed: str, reused: str, ideal: str, reached: str) -> str:
    return f"{requests:>10}{requested:>13}{computed:>13}{reused:>13}{ideal:>9}{reached:>9}"


def _as_dict(task: TaskReport) -> dict[str, Any]:
    ratios = {"ideal_ratio": task.ideal_ratio, "reached_ratio": task.reached_ratio}
    return {**asdict(task), "reused_tokens": task.reused_tokens, **ratios}
