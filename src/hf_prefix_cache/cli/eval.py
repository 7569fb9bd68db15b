"""``hf-prefix-cache eval``: lm-evaluation-harness' own command line, with the model ``hf-prefix`` by default."""

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from ._console import clear_errors

__all__ = ["CONTEXT_SETTINGS", "evaluate"]

# Everything behind the command's name is the harness', --help included.
CONTEXT_SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

_HELP = ("-h", "--help")
_OTHER_COMMANDS = ("ls", "validate")


def evaluate(context: typer.Context) -> None:
    """Evaluate a model with lm-evaluation-harness, each shared prefix once.

    The rest of the command line is the harness' own, with --model hf-prefix
    unless it names another model:

    hf-prefix-cache eval --model_args pretrained=gpt2 --tasks arc_easy

    --model_args takes what the harness' model hf takes (pretrained, peft,
    dtype, max_length and so on), and max_batch_tokens and self_check. The
    metrics are the harness'; below them stands what each task asked for,
    computed and reused.

    Several processes share the work:

    accelerate launch --no_python hf-prefix-cache eval ...

    Needs lm-evaluation-harness: pip install lm_eval
    """
    arguments = context.args
    if not arguments or arguments[0] in _HELP:
        typer.echo(context.get_help())
        if not arguments:
            raise typer.Exit(2)
        if importlib.util.find_spec("lm_eval") is None:
            raise typer.Exit
        typer.echo("\nThe harness' own options:\n")
        arguments = ["run", "--help"]
    with clear_errors():
        # Here, so that --help of other commands does not wait for PyTorch. Ours comes first: it says what is missing.
        from ..integrations.lm_eval import MODEL_NAME, last_prefix_report  # isort: skip
        from lm_eval.__main__ import cli_evaluate

        with _command_line(with_default_model(arguments, MODEL_NAME)):
            cli_evaluate()
        report = last_prefix_report()
    if report is not None:
        typer.echo(f"\n{report}")


def with_default_model(arguments: Sequence[str], name: str) -> list[str]:
    """Return the harness' arguments with ``--model name`` where neither they nor their configuration file name one.

    Example:
        >>> with_default_model(["--tasks", "arc_easy"], "hf-prefix")
        ['--tasks', 'arc_easy', '--model', 'hf-prefix']
        >>> with_default_model(["run", "--model=hf", "--tasks", "arc_easy"], "hf-prefix")
        ['run', '--model=hf', '--tasks', 'arc_easy']
    """
    given = list(arguments)
    if given[0] in _OTHER_COMMANDS or any(argument in _HELP for argument in given):
        return given
    if _value_of(given, "--model", "-M") is not None or _names_model(_value_of(given, "--config", "-C")):
        return given
    return [*given, "--model", name]


def _value_of(arguments: list[str], long: str, short: str) -> str | None:
    """Return the value of an option in the forms that argparse takes, or None where it is not given."""
    for place, argument in enumerate(arguments):
        if argument in (long, short):
            return arguments[place + 1] if place + 1 < len(arguments) else ""
        if argument.startswith(f"{long}="):
            return argument[len(long) + 1 :]
        if argument.startswith(short) and not argument.startswith("--"):
            return argument[len(short) :]
    return None


def _names_model(config: str | None) -> bool:
    """Return whether the harness' configuration file names a model."""
    if not config or not Path(config).is_file():
        return False  # the harness will say so
    import yaml

    content = yaml.safe_load(Path(config).read_text(encoding="utf-8"))
    return isinstance(content, dict) and "model" in content


@contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    """Let ``sys.argv``, which the harness reads, be ``arguments``."""
    before = sys.argv
    sys.argv = ["lm-eval", *arguments]
    try:
        yield
    finally:
        sys.argv = before
