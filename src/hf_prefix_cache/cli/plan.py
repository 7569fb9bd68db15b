"""``hf-prefix-cache plan``: what sharing prefixes would save on a file of requests, before anything is computed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import clear_errors, print_json

if TYPE_CHECKING:
    from ..scoring import SharingPlan

__all__ = ["plan"]

_DTYPES = ("float32", "bfloat16")


def plan(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON lines, also gzipped: context and continuation, or context_ids and continuation_ids."
        ),
    ],
    model: Annotated[str | None, typer.Option(help="A Hub id or a folder, for its tokenizer and its memory.")] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A Hub id or a folder.", show_default="the model's, or the packaged one")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw the prefix tree into this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable results only.")] = False,
) -> None:
    """Tell how many tokens a file of requests takes: as plain rows, grouped, and with each token once.

    Nothing is computed with a model. Prints the ideal speed-up, the levels of
    the prefix tree, the prefixes that weigh most, a drawing of the tree, and
    with --model the memory that keys and values take.
    """
    # Here, so that --help does not wait for PyTorch.
    from ..scoring import plan as plan_requests
    from ._loading import load_config, load_tokenizer
    from ._requests import read_table

    with clear_errors():
        config = load_config(model) if model is not None else None
        table = read_table(file, tokenizer=lambda: load_tokenizer(tokenizer or model), prefix_token_id=_UNKNOWN_PREFIX)
        table.refuse_bad_lines(file)
        sharing = plan_requests(table.requests)
        memory = _memory(sharing, config) if config is not None else None
        if png is not None:
            sharing.save_png(png, title=None)
        if as_json:
            print_json(_results(sharing, table.lines, memory))
        else:
            _show(sharing, table.lines, memory)


_UNKNOWN_PREFIX = -1  # stands for the model's own beginning-of-text token; no request of a file holds it


def _memory(sharing: "SharingPlan", config: Any) -> dict[str, int]:
    import torch

    return {name: sharing.kv_bytes(config, getattr(torch, name)) for name in _DTYPES}


def _results(sharing: "SharingPlan", lines: list[int], memory: dict[str, int] | None) -> dict[str, Any]:
    return {
        "requests": sharing.requests,
        "total_tokens": sharing.total_tokens,
        "grouped_tokens": sharing.grouped_tokens,
        "unique_tokens": sharing.unique_tokens,
        "ideal_speedup": sharing.ideal_speedup,
        "ideal_speedup_plain": sharing.ideal_speedup_plain,
        "levels": sharing.levels,
        "longest_row": sharing.longest_row,
        "heaviest_prefixes": [
            {
                "saved_tokens": node.saved_tokens,
                "tokens": node.end,
                "requests": node.requests,
                "level": node.level,
                "example_line": lines[node.example],
            }
            for node in sharing.heaviest_prefixes
        ],
        "kv_bytes": memory,
    }


def _show(sharing: "SharingPlan", lines: list[int], memory: dict[str, int] | None) -> None:
    from rich.filesize import decimal

    typer.echo(f"{sharing.requests:,} requests, {sharing.levels} levels, longest row {sharing.longest_row:,} tokens\n")
    for tokens, what, ratio in (
        (sharing.total_tokens, "tokens as plain rows", sharing.ideal_speedup_plain),
        (sharing.grouped_tokens, "with one-token grouping", sharing.ideal_speedup),
        (sharing.unique_tokens, "each token once", 1.0),
    ):
        typer.echo(f"{tokens:>15,}  {what:<26}{ratio:>8.2f} x")
    if memory is not None:
        sizes = ", ".join(f"{decimal(size)} in {name}" for name, size in memory.items())
        typer.echo(f"\nKeys and values at the peak: {sizes} (the weights come on top)")
    if sharing.heaviest_prefixes:
        typer.echo(f"\nHeaviest shared prefixes\n{'tokens saved':>15}{'long':>9}{'requests':>10}{'such as line':>14}")
    for node in sharing.heaviest_prefixes:
        typer.echo(f"{node.saved_tokens:>15,}{node.end:>9,}{node.requests:>10,}{lines[node.example]:>14,}")
    typer.echo(f"\n{sharing.draw()}")
