"""What all subcommands share: where they print, how they wait, how they fail."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from ..exceptions import PrefixCacheError

__all__ = ["CommandError", "clear_errors", "print_json", "progress_bar"]


class CommandError(Exception):
    """A command cannot do what was asked, or found something wrong; the message is all that the user needs."""


def print_json(results: Any) -> None:
    """Print ``results`` as JSON on standard output."""
    typer.echo(json.dumps(results, indent=2, ensure_ascii=False))


@contextmanager
def clear_errors() -> Iterator[None]:
    """Turn expected errors into one line on standard error and exit code 1; any other is a defect and shows in full.

    Raises:
        typer.Exit: Instead of `CommandError` and of the package's own errors.
    """
    try:
        yield
    except (CommandError, PrefixCacheError) as error:
        line = Text.assemble(("error: ", "bold red"), " ".join(str(error).split()))
        Console(stderr=True).print(line, soft_wrap=True)
        raise typer.Exit(1) from error


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[[str], None]]:
    """Show a progress bar of ``total`` steps on standard error, if that is a terminal, and take it away at the end.

    Yields:
        A function to call before each step with what the step does.
    """
    columns = (
        SpinnerColumn(),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        begun = False

        def step(description: str) -> None:
            nonlocal begun
            progress.update(task, advance=int(begun), description=description)
            begun = True

        yield step
