"""What ``hf-prefix-cache inspect`` finds out about files, and how it draws them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import filelock
from rich.filesize import decimal
from rich.markup import escape
from rich.tree import Tree

from ..exceptions import PrefixCacheError
from ..snapshot_file import SnapshotHeader, read_snapshot, read_snapshot_header
from ..store.directory import SnapshotDirectory
from ._console import CommandError

__all__ = ["InspectedFile", "describe", "draw", "inspect_files", "prune_directory"]

_SHOWN = 8  # token ids of a run that are shown
_SHOWN_TEXT = 60  # and characters


class InspectedFile(NamedTuple):
    """A file and what it says.

    Attributes:
        name: Its name.
        nbytes: Its bytes.
        last_used: When it was used last, in seconds since 1970.
        header: What it says of its prefix, or None where it cannot be read.
        tokens: Token ids of its first row.
        error: Why it cannot be read, or None.
    """

    name: str
    nbytes: int
    last_used: float
    header: SnapshotHeader | None
    tokens: tuple[int, ...]
    error: str | None


def inspect_files(directory: Path, *, verify: bool, step: Callable[[str], None]) -> list[InspectedFile]:
    """Return all files of prefixes in ``directory``, by name.

    Args:
        directory: The folder.
        verify: Read them whole, and check every bit.
        step: Called with each name before it is read.
    """
    found = []
    for path in sorted(directory.glob("*.safetensors")):
        step(path.name)
        try:
            state = path.lstat()
        except FileNotFoundError:  # another process removed it
            continue
        header, tokens, error = None, (), None
        try:
            header, input_ids = read_snapshot_header(path)
            tokens = tuple(input_ids.reshape(-1, header.seq_length)[0].tolist())
            if verify:
                read_snapshot(path)
        except (PrefixCacheError, OSError) as failure:
            error = " ".join(str(failure).split())
        found.append(InspectedFile(path.name, state.st_size, state.st_mtime, header, tokens, error))
    return found


def prune_directory(directory: Path, max_bytes: int) -> list[str]:
    """Remove files of stores until the rest takes at most ``max_bytes``; return their names.

    Raises:
        CommandError: Other processes keep writing, or the directory cannot be written to.
    """
    try:
        return SnapshotDirectory(directory, max_bytes).prune(max_bytes)
    except (filelock.Timeout, OSError) as error:
        raise CommandError(f"{directory} cannot be pruned now: {error}") from error


def describe(file: InspectedFile) -> dict[str, Any]:
    """Return ``file`` in plain values."""
    header = {} if file.header is None else file.header._asdict()
    found = {"file": file.name, "bytes": file.nbytes, "last_used": file.last_used, "error": file.error}
    return {**found, **header, "input_ids": list(file.tokens)}


def draw(files: Sequence[InspectedFile], decode: Callable[[list[int]], str] | None) -> Iterator[Tree]:
    """Yield one tree for each model, tenant and strategy.

    Args:
        files: The files; those that cannot be read are left out.
        decode: Turns token ids into text; None shows ids.
    """
    groups: dict[tuple[str, str, str, str], list[InspectedFile]] = {}
    for file in files:
        if file.header is not None and file.error is None:
            held = file.header
            key = (held.model_type, held.fingerprint, held.namespace, held.lossy_key or "exact")
            groups.setdefault(key, []).append(file)
    for (model_type, fingerprint, namespace, kind), members in sorted(groups.items()):
        tenant = f", namespace {escape(namespace)}" if namespace else ""
        tree = Tree(f"[bold]{escape(model_type)}[/bold] {escape(fingerprint[:12])}{tenant}, {escape(kind)}")
        _branch(tree, sorted(members, key=lambda file: file.tokens), 0, decode)
        yield tree


def _branch(
    tree: Tree, members: Sequence[InspectedFile], start: int, decode: Callable[[list[int]], str] | None
) -> None:
    """Add ``members``, sorted and equal before ``start``, to ``tree``."""
    while members and len(members[0].tokens) == start:
        tree.add(_ending(members[0]))
        members = members[1:]
    while members:
        first = members[0].tokens[start]
        count = next((i for i, file in enumerate(members) if file.tokens[start] != first), len(members))
        group, members = members[:count], members[count:]
        low, high = group[0].tokens, group[-1].tokens
        stop = next(
            (i for i, pair in enumerate(zip(low, high, strict=False)) if pair[0] != pair[1]), min(len(low), len(high))
        )
        branch = tree.add(f"{stop - start:,} tokens: {_shown(low[start:stop], decode)}")
        _branch(branch, group, stop, decode)


def _shown(tokens: Sequence[int], decode: Callable[[list[int]], str] | None) -> str:
    if decode is not None:
        text = repr(decode(list(tokens[: _SHOWN_TEXT + 1])))[1:-1]
        return escape(text if len(text) <= _SHOWN_TEXT else f"{text[:_SHOWN_TEXT]}…")
    ids = " ".join(map(str, tokens[:_SHOWN]))
    return ids if len(tokens) <= _SHOWN else f"{ids} …"


def _ending(file: InspectedFile) -> str:
    age = max(0.0, time.time() - file.last_used)
    for size, unit in ((86_400, "days"), (3_600, "hours"), (60, "minutes")):
        if age >= size:
            used = f"{age / size:.0f} {unit} ago"
            break
    else:
        used = "just now"
    return f"[green]{len(file.tokens):,} tokens[/green] in {escape(file.name)}, {decimal(file.nbytes)}, used {used}"
