"""The command ``hf-prefix-cache`` and its subcommands."""

import platform
from importlib import metadata
from typing import Annotated

import typer

from ._command import PackageCommand
from .bench import bench
from .check import check
from .demo import demo
from .eval import CONTEXT_SETTINGS as EVAL_CONTEXT
from .eval import evaluate
from .inspect import inspect
from .plan import plan
from .score import score

__all__ = ["app", "main"]

app = typer.Typer(
    help="Compute a prompt prefix once, then use it exactly, everywhere in Hugging Face Transformers.",
    no_args_is_help=True,
    add_completion=False,
)


def _version_of(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "(not installed as a package)"


def _show_version(wanted: bool) -> None:
    if wanted:
        versions = ", ".join(f"{name} {_version_of(name)}" for name in ("transformers", "torch"))
        typer.echo(f"hf-prefix-cache {_version_of('hf-prefix-cache')}")
        typer.echo(f"{versions}, Python {platform.python_version()}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions and exit.")
    ] = False,
) -> None:
    """Hold the options that come before a subcommand; its docstring is not shown."""


app.command(cls=PackageCommand)(check)
app.command(cls=PackageCommand)(demo)
app.command("eval", cls=PackageCommand, context_settings=EVAL_CONTEXT)(evaluate)
app.command(cls=PackageCommand)(inspect)
app.command(cls=PackageCommand)(plan)
app.command(cls=PackageCommand)(score)
app.add_typer(bench, name="bench")


def main() -> None:
    """Run the command line."""
    app()
