"""``hf-prefix-cache demo``: a real model answers with a reused prefix, and every answer is checked."""

from collections.abc import Sequence
from dataclasses import asdict
from enum import Enum
from importlib.util import find_spec
from typing import Annotated

import typer

from ._console import CommandError, clear_errors, print_json, progress_bar

__all__ = ["Strategy", "demo"]


PACKAGED = "SmolLM2-135M-Instruct"


class Strategy(str, Enum):
    """The strategies that the demo can show."""

    DYNAMIC = "prefix-dynamic"
    STATIC = "prefix-static"
    QUANTIZED = "prefix-quantized"
    OFFLOADED = "prefix-offloaded"


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="A Hub id or a folder.", show_default=f"the packaged {PACKAGED}"),
    ] = None,
    strategy: Annotated[
        list[Strategy] | None,
        typer.Option(
            metavar="NAME",
            help=f"{', '.join(choice.value for choice in Strategy)}; can be given several times.",
            show_default="each of them",
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer at most.")] = 24,
    as_json: Annotated[bool, typer.Option("--json", help="Print machine-readable results only.")] = False,
) -> None:
    """A real model answers questions behind one long instruction, without and with reuse.

    Then the computed instruction is forked, continued in two ways, and cropped back.

    The exit code is not 0 if any token of any answer by an exact strategy differs from uncached generation. What
    prefix-quantized gives up is shown instead: its error, and the share of tokens that are equal.
    """
    # Here, so that --help does not wait for PyTorch.
    from .demo_run import load, run_demo, step_count
    from .demo_view import show

    strategies = [choice.value for choice in strategy or _that_run_here()]
    with clear_errors():
        with progress_bar(1 + step_count(strategies)) as step:
            step("Loading the model")
            name = model or f"{PACKAGED} (packaged)"
            result = run_demo(*load(model), name=name, strategies=strategies, new_tokens=new_tokens, step=step)
        if as_json:
            print_json(asdict(result))
        else:
            show(result)
        if not result.equal:
            raise CommandError(
                "an answer with a reused prefix is not the uncached one (marked above); please report this as a bug"
            )


def _that_run_here() -> Sequence[Strategy]:
    if find_spec("bitsandbytes") is not None:
        return list(Strategy)
    typer.echo(f"{Strategy.QUANTIZED.value} is left out, since bitsandbytes is not installed", err=True)
    return [choice for choice in Strategy if choice is not Strategy.QUANTIZED]
