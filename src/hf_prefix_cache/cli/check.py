"""``hf-prefix-cache check``: the exactness contract, on the user's own model and device."""

from typing import TYPE_CHECKING, Annotated

import typer

from ._console import CommandError, clear_errors, print_json, progress_bar

if TYPE_CHECKING:
    from ..check import CheckReport

__all__ = ["check"]

PACKAGED = "the packaged SmolLM2-135M-Instruct"


def check(
    model: Annotated[
        str | None, typer.Argument(help="A Hub id or a folder.", show_default=PACKAGED, metavar="MODEL")
    ] = None,
    strategy: Annotated[
        list[str] | None, typer.Option(help="Check this strategy only; may be given again.", show_default="all")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the weights: float32, bfloat16 or float16.")] = "float32",
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of a prefix at most.")] = 256,
    quick: Annotated[bool, typer.Option("--quick", help="Look at a few split points only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable results only.")] = False,
) -> None:
    """Compare every strategy and operation with the uncached model, row by row; exit with 1 on any difference.

    Prefixes are cut before, at and beyond each length at which the model works differently, and continued by 1, 2 and
    7 tokens. What is not done exactly must be refused by name: such cells are no failure.
    """
    # Here, so that --help does not wait for PyTorch.
    import torch

    from ..check import OPERATIONS
    from ..check import check as check_model
    from ..validation import STRATEGIES
    from ._loading import load_for_scoring

    with clear_errors():
        types = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16")}
        if dtype not in types:
            raise CommandError(f"the dtype {dtype!r} is not one of {', '.join(types)}")
        loaded, _ = load_for_scoring(model)
        chosen = strategy or [name for name in STRATEGIES if name != "prefix-auto"]
        with progress_bar(len(chosen) * len(OPERATIONS) + 1) as step:
            report = check_model(
                loaded.to(types[dtype]),
                strategies=chosen,
                max_tokens=max_tokens,
                thorough=not quick,
                on_step=step,
            )
        if as_json:
            print_json(report.to_dict())
        else:
            _show(report)
        if not report.passed:
            raise typer.Exit(1)


def _show(report: "CheckReport") -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print(report)
    for cell in report.cells:
        for what, text in (("", cell.error), ("note: ", cell.note)):
            if text and (cell.outcome != "exact" or what == "" or not cell.error):
                console.print(Text(f"{cell.strategy}, {cell.operation}: {what}{text}"), soft_wrap=True)
    exact = sum(cell.outcome == "exact" for cell in report.cells)
    refused = sum(cell.outcome == "refused" for cell in report.cells)
    console.print(f"\n{exact} exact, {refused} refused by name, {len(report.problems)} wrong.")
