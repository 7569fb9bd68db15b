"""``hf-prefix-cache bench``: what a model gains and gives up, measured on the spot."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ._command import PackageCommand
from ._console import CommandError, clear_errors, print_json, progress_bar

if TYPE_CHECKING:
    from .bench_memory import MemoryBench

__all__ = ["bench"]

bench = typer.Typer(help="Measure, on this machine and with your model.", no_args_is_help=True)


@bench.callback()
def _common() -> None:
    """Keep `memory` a subcommand; its docstring is not shown."""


@bench.command(cls=PackageCommand)
def memory(
    text: Annotated[Path, typer.Argument(help="A long text: its beginning is the prefix, perplexity is of the rest.")],
    model: Annotated[
        str | None, typer.Option(help="A Hub id or a folder.", show_default="the packaged SmolLM2-135M-Instruct")
    ] = None,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of the prefix.")] = 2048,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens behind it that perplexity is measured on.")] = 512,
    png: Annotated[Path | None, typer.Option(help="Draw bytes against perplexity into this file, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable results only.")] = False,
) -> None:
    """Tell what a quantized prefix takes and loses, for each backend and number of bits.

    Computes the prefix exactly, quantizes it, and prints its bytes, the
    perplexity of the text behind it, how many of 64 greedy tokens agree with
    the exact model's, and seconds.
    """
    # Here, so that --help does not wait for PyTorch.
    from ._loading import load_for_scoring
    from .bench_memory import draw, read_ids, run_memory_bench, step_count

    with clear_errors():
        if not text.is_file():
            raise CommandError(f"text is {str(text)!r}, which is no file; name a file with a long text")
        with progress_bar(1 + step_count()) as step:
            step("Loading the model")
            loaded, tokenizer = load_for_scoring(model)
            ids = read_ids(text, loaded, tokenizer, prefix=prefix, tokens=tokens)
            results = run_memory_bench(loaded, ids, prefix=prefix, step=step)
        if png is not None:
            draw(results, png)
        if as_json:
            print_json(asdict(results))
        else:
            _show(results)


def _show(results: "MemoryBench") -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(title=f"A prefix of {results.prefix_tokens:,} tokens, {results.scored_tokens:,} tokens behind it")
    table.add_column("held in", no_wrap=True)
    for name in ("bytes", "of exact", "bits", "perplexity", "change", "greedy", "quantizing", "a token"):
        table.add_column(name, justify="right", no_wrap=True)
    exact = results.exact
    table.add_row(
        results.dtype,
        decimal(exact.nbytes),
        "100 %",
        "",
        f"{exact.perplexity:.3f}",
        "",
        "",
        "",
        f"{1000 * exact.seconds_per_token:.0f} ms",
    )
    for entry in results.quantized:
        table.add_row(
            entry.name,
            decimal(entry.nbytes),
            f"{100 * entry.nbytes / exact.nbytes:.1f} %",
            f"{entry.bits_per_value:.2f}",
            f"{entry.perplexity:.3f}",
            f"{100 * (entry.perplexity / exact.perplexity - 1):+.2f} %",
            f"{entry.greedy_agreement} of {results.greedy_tokens}",
            f"{entry.seconds_to_quantize:.1f} s",
            f"{1000 * entry.seconds_per_token:.0f} ms",
        )
    Console().print(table)
    for reason in results.left_out:
        typer.echo(f"left out: {reason}")
