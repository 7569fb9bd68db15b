"""The demo's results for people, laid out for 80 columns."""

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .demo_results import Answer, Branch, DemoResult, Loss, StrategyResult

__all__ = ["show"]


def show(result: DemoResult) -> None:
    """Print ``result`` on standard output."""
    console = Console(highlight=False)
    first = result.strategies[0]
    threads = f"{result.threads} thread{'' if result.threads == 1 else 's'}"
    console.print(f"[bold]{result.model}[/bold], {result.dtype} on {result.device} with {threads}\n")
    console.print(
        f"Every question comes after the same {first.prefix_tokens:,} tokens, a museum's visitor guide. Plain "
        "Transformers computes them again for each question; with reuse they are computed once.\n"
    )
    for number, answer in enumerate(first.answers, start=1):
        console.print(_question(number, answer))
    for strategy in result.strategies:
        console.rule(f"[bold]{strategy.strategy}[/bold]")
        console.print(_table(strategy))
        if strategy.loss is not None:
            console.print(Padding(_in_words(strategy.loss), (0, 0, 1, 1), expand=False))
        console.print(Padding(_forks(strategy), (0, 0, 1, 1), expand=False))
    if len(result.strategies) > 1:
        console.rule("[bold]side by side[/bold]")
        console.print(_side_by_side(result))
    console.rule()
    exact = [strategy.strategy for strategy in result.strategies if strategy.loss is None]
    if result.equal and exact:
        console.print(
            f"[green]Every answer with a prefix reused by {_listed(exact)} is the uncached one, token for "
            "token.[/green]"
        )


def _question(number: int, answer: Answer) -> Padding:
    return Padding(Text.assemble(f"{number}. {answer.question}\n", (answer.text, "cyan")), (0, 0, 1, 1), expand=False)


def _table(result: StrategyResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_footer=True, padding=(0, 1))
    table.add_column("", footer="together")
    table.add_column("tokens\ncomputed", justify="right")
    table.add_column("tokens\nreused", justify="right")
    table.add_column("without\nreuse", footer=_seconds(result.seconds_plain), justify="right")
    table.add_column("with\nreuse", footer=_seconds(result.seconds_reused), justify="right")
    table.add_column("speed-up", footer=f"{result.speed_up:.1f} x", justify="right", vertical="bottom")
    table.add_column("equal", justify="center")
    table.add_row("the guide, once", f"{result.prefix_tokens:,}", "", "", _seconds(result.prefix_seconds), "", "")
    for number, answer in enumerate(result.answers, start=1):
        table.add_row(
            f"question {number}",
            f"{answer.computed_tokens:,}",
            f"{answer.reused_tokens:,}",
            _seconds(answer.seconds_plain),
            _seconds(answer.seconds_reused),
            f"{answer.seconds_plain / answer.seconds_reused:.1f} x",
            _mark(answer.equal) if result.loss is None else f"{answer.equal_share:.0%}",
        )
    return table


def _in_words(loss: Loss) -> str:
    return (
        f"It keeps fewer bits, and says what that costs: keys are off by up to {loss.keys:.1%} and values by up to "
        f"{loss.values:.1%}; {loss.equal_share:.0%} of the answers' tokens are the uncached ones. It is never mixed "
        "with the exact strategies."
    )


def _side_by_side(result: DemoResult) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("")
    for name in ("with reuse", "speed-up", "guide kept", "guide and\ntwo forks", "equal"):
        table.add_column(name, justify="right", vertical="bottom")
    for strategy in result.strategies:
        table.add_row(
            strategy.strategy,
            _seconds(strategy.seconds_reused),
            f"{strategy.speed_up:.1f} x",
            decimal(strategy.prefix_bytes),
            decimal(strategy.fork.shared_bytes),
            _mark(strategy.equal) if strategy.loss is None else f"{strategy.loss.equal_share:.0%}",
        )
    return table


def _listed(names: list[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _forks(result: StrategyResult) -> Tree:
    fork = result.fork
    tree = Tree(
        f"The guide takes {decimal(result.prefix_bytes)} where it is kept and {decimal(result.cache_bytes)} as a "
        f"cache; with two forks, {decimal(fork.shared_bytes)} together (three copies: "
        f"{decimal(fork.copied_bytes)})"
    )
    back = f"crop_to({result.prefix_tokens})" if fork.went_back_by == "crop_to" else "restore(snapshot)"
    names = [f"fork {number}" for number in range(1, len(fork.branches) + 1)]
    for name, branch in zip((*names, f"fork 1 after {back}"), (*fork.branches, fork.afterwards), strict=True):
        tree.add(_branch(name, branch, is_exact=result.loss is None))
    return tree


def _branch(name: str, branch: Branch, *, is_exact: bool) -> Text:
    equal = _mark(branch.equal) if is_exact else f"{branch.equal_share:.0%}"
    mark = Text.from_markup(f" (equal: {equal})")
    return Text.assemble((f"{name}: ", "bold"), branch.question, mark, "\n", (branch.text, "cyan"))


def _mark(equal: bool) -> str:
    return "[green]yes[/green]" if equal else "[bold red]NO[/bold red]"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"
