"""``hf-prefix-cache inspect``: which prefixes a directory holds, whether their files are whole, and less of them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import CommandError, clear_errors, print_json, progress_bar

if TYPE_CHECKING:
    from .inspect_files import InspectedFile

__all__ = ["inspect"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def inspect(
    directory: Annotated[Path, typer.Argument(help="A folder with saved prefixes, such as a store's directory.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every file whole and check every bit.")] = False,
    prune: Annotated[
        str | None,
        typer.Option(help="Remove prefixes used least recently until the rest takes this much, such as 500MB."),
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A Hub id or a folder: show text instead of token ids.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable results only.")] = False,
) -> None:
    """Draw the prefixes that a directory holds as a tree of their tokens, with their files.

    Exits with 1 if a file cannot be read. --prune removes files of stores only, never those that were saved by hand.
    """
    # Here, so that --help does not wait for PyTorch.
    from .inspect_files import describe, inspect_files, prune_directory

    with clear_errors():
        if not directory.is_dir():
            raise CommandError(f"{directory} is not a directory; name the folder that a store or save wrote to")
        room = None if prune is None else _bytes_of(prune)
        pruned = [] if room is None else prune_directory(directory, room)
        with progress_bar(len(list(directory.glob("*.safetensors")))) as step:
            files = inspect_files(directory, verify=verify, step=step)
        bad = [file for file in files if file.error is not None]
        if as_json:
            print_json({"directory": str(directory), "pruned": pruned, "files": [describe(file) for file in files]})
        else:
            _show(files, bad, pruned, verify=verify, tokenizer=tokenizer)
        if bad:
            raise typer.Exit(1)


def _bytes_of(size: str) -> int:
    text = size.strip().lower().removesuffix("b")
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS and text[-1:] else (text, "")
    try:
        value = float(number)
        if not 0 <= value < float("inf"):
            raise ValueError
    except ValueError as error:
        raise CommandError(f"--prune is {size!r}; it is a number of bytes, such as 500MB, 2GB or 0") from error
    return int(value * _UNITS[unit])


def _show(
    files: "list[InspectedFile]",
    bad: "list[InspectedFile]",
    pruned: list[str],
    *,
    verify: bool,
    tokenizer: str | None,
) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.markup import escape

    from ._loading import load_tokenizer
    from .inspect_files import draw

    console = Console()
    decode: Any = None if tokenizer is None else load_tokenizer(tokenizer).decode
    for tree in draw(files, decode):
        console.print(tree)
    total = sum(file.nbytes for file in files)
    state = ", every bit checked" if verify else ""
    console.print(f"{len(files) - len(bad):,} prefixes, {decimal(total)}{state}")
    for file in bad:
        console.print(f"[red]unreadable[/red] {escape(file.name)}: {escape(str(file.error))}")
    if pruned:
        console.print(f"removed {len(pruned):,} files")
