"""``hf-prefix-cache score``: log-probabilities of a file of requests, in order, each shared prefix once."""

import gzip
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ._console import CommandError, clear_errors, print_json

if TYPE_CHECKING:
    from ._requests import RequestTable
    from .score_progress import ScoreProgress
    from .score_run import ScoringTotals

__all__ = ["Truncation", "score"]

PACKAGED = "the packaged SmolLM2-135M-Instruct"


class Truncation(str, Enum):
    """What to do with a request that is longer than the model can read."""

    ERROR = "error"
    LEFT = "left"


def score(
    file: Annotated[
        Path,
        typer.Argument(
            help="JSON lines, also gzipped: context and continuation, or context_ids and continuation_ids."
        ),
    ],
    model: Annotated[str | None, typer.Option(help="A Hub id or a folder.", show_default=PACKAGED)] = None,
    output: Annotated[
        Path | None, typer.Option(help="Where the scores go, as JSON lines.", show_default="standard output")
    ] = None,
    batch_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens computed at once at most.", show_default="by the free memory")
    ] = None,
    truncation: Annotated[
        Truncation, typer.Option(help="Refuse requests that are too long, or drop their first tokens.")
    ] = Truncation.ERROR,
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Go on where a line is malformed: its own output is an error.")
    ] = False,
    resume: Annotated[
        bool, typer.Option(help="Go on where an interrupted run with this output stopped, or start over.")
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one machine-readable result, with the scores if there is no output.")
    ] = False,
) -> None:
    """Score the continuation of each line given its context; prefixes that lines share are computed once.

    One JSON line comes out for each line that went in, in order: line,
    logprob, is_greedy and token_logprobs. Finished work is kept beside the
    output while it goes on, so that the same command continues after an
    interruption.
    """
    # Here, so that --help does not wait for PyTorch.
    from ..fingerprint import fingerprint_of
    from ..scoring.model_access import prefix_token
    from ._loading import load_for_scoring
    from ._requests import read_table
    from .score_progress import ScoreProgress, digest_of
    from .score_run import fit_table, score_portions

    with clear_errors():
        if output is not None:
            _check_output(output, file, resume)
        loaded, tokenizer = load_for_scoring(model)
        token = prefix_token(loaded.config)
        table = read_table(file, tokenizer=lambda: tokenizer, prefix_token_id=token, text_prefix_token_id=token)
        table = fit_table(table, loaded, truncate=truncation is Truncation.LEFT)
        if not skip_bad:
            table.refuse_bad_lines(file, "; --skip-bad scores the others")
        identity = {"requests": digest_of(table.requests), "model": fingerprint_of(loaded)}
        with ScoreProgress(output, identity) as progress:
            try:
                totals = score_portions(loaded, table.requests, progress, max_batch_tokens=batch_tokens)
            except KeyboardInterrupt as error:
                raise CommandError(_interrupted(progress, len(table.lines))) from error
        rows = list(_rows(table, progress))
        if output is not None:
            _write(output, rows)
            progress.remove()
        summary = {"requests": len(table.lines), "bad_lines": len(table.bad), **asdict(totals)}
        if as_json:
            print_json(summary if output is not None else {**summary, "scores": rows})
            return
        if output is None:
            for row in rows:
                typer.echo(json.dumps(row))
        typer.echo(_summary(table, totals), err=output is None)


def _check_output(output: Path, file: Path, resume: bool) -> None:
    if output.exists() and file.exists() and output.samefile(file):
        raise CommandError(f"the output {str(output)!r} is the file of requests itself; name another one")
    if not output.parent.is_dir():
        raise CommandError(f"the output's folder {str(output.parent)!r} does not exist; make it first")
    if not resume:
        from .score_progress import partial_path

        partial_path(output).unlink(missing_ok=True)
    elif output.exists():
        raise CommandError(f"{str(output)!r} exists already; name another output, or pass --no-resume to replace it")


def _rows(table: "RequestTable", progress: "ScoreProgress") -> Iterator[dict[str, Any]]:
    errors = [(line, {"error": error}) for line, error in table.bad.items()]
    scores = [(line, progress.scores[index]._asdict()) for index, line in enumerate(table.lines)]
    for line, result in sorted([*errors, *scores], key=lambda entry: entry[0]):
        yield {"line": line, **result}


def _write(output: Path, rows: list[dict[str, Any]]) -> None:
    unfinished = output.with_name(f"{output.name}.unfinished")
    try:
        opened: Any = gzip.open if output.suffix == ".gz" else open
        with opened(unfinished, "wt", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
        os.replace(unfinished, output)
    except OSError as error:
        raise CommandError(f"the output {str(output)!r} cannot be written: {error.strerror}") from error


def _interrupted(progress: "ScoreProgress", requests: int) -> str:
    if progress.path is None:
        return "interrupted; with --output, finished work would have been kept"
    done = f"{len(progress.scores):,} of {requests:,} requests are kept in {str(progress.path)!r}"
    return f"interrupted; {done}: the same command goes on from there"


def _summary(table: "RequestTable", totals: "ScoringTotals") -> str:
    parts = [f"{len(table.lines):,} requests scored"]
    if totals.resumed_requests:
        parts.append(f"{totals.resumed_requests:,} of them by an earlier run")
    if table.bad:
        parts.append(f"{len(table.bad):,} bad lines")
    if totals.computed_tokens:
        ratio = totals.requested_tokens / totals.computed_tokens
        parts.append(
            f"{totals.computed_tokens:,} of {totals.requested_tokens:,} tokens computed ({ratio:.1f} times less) in "
            f"{totals.seconds:.1f} s"
        )
    return ", ".join(parts)
