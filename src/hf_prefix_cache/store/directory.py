"""Prefixes as files in a directory that several processes may use at once."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import filelock

from ..exceptions import PrefixCacheError, SnapshotFileError, StoreIntegrityError
from ..snapshot import PrefixSnapshot
from ..snapshot_file import SnapshotHeader, prepare_snapshot, read_snapshot, read_snapshot_header
from .entry import Key
from .token_index import Indexed, TokenIndex
from .tokens import encode_tokens

__all__ = ["FoundFile", "SnapshotDirectory"]

_NAME = re.compile(r"[0-9a-f]{32}\.safetensors")
_LEFT_BEHIND = re.compile(_NAME.pattern + r"\.[0-9a-f]{16}\.partial")
_LOCK, _ASIDE = ".lock", "set-aside"
_PATIENCE = 10.0  # seconds that a prefix waits for other writers before it is not written at all
_TICK = 50_000_000  # nanoseconds in which a directory may change twice at one time stamp


class FoundFile(NamedTuple):
    """A file that begins like a prompt.

    Attributes:
        name: Its name.
        key: What its prefix belongs to.
        usable: Tokens that it can give.
        nbytes: Its bytes.
        device: Where its tensors were.
    """

    name: str
    key: Key
    usable: int
    nbytes: int
    device: str


class _File(NamedTuple):
    key: Key
    nbytes: int
    device: str


class SnapshotDirectory:
    """Files of prefixes within a budget of bytes, of which those used least recently go first.

    A name is a digest of key and tokens, so no two processes write different things to one name. Writers take turns
    behind a lock; readers need none, since files appear whole and are never changed. What cannot be read is moved into
    the folder ``set-aside``. Other files are left alone.

    Args:
        path: The directory; made if it is not there.
        max_bytes: Budget for the files.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self.path, self.max_bytes = path, max_bytes
        self.damaged = 0
        path.mkdir(parents=True, exist_ok=True)
        self._lock = filelock.FileLock(path / _LOCK)
        self._files: dict[str, _File] = {}
        self._by_key: dict[Key, TokenIndex] = {}
        self._seen: int | None = None  # when the directory had changed last, when it was read

    def __len__(self) -> int:
        self._read()
        return len(self._files)

    @property
    def nbytes(self) -> int:
        """Bytes of the files."""
        self._read()
        return sum(file.nbytes for file in self._files.values())

    def find(self, keys: list[Key], tokens: bytes, *, longer_than: int) -> FoundFile | None:
        """Return the file that can give the most first tokens of a prompt, if those are more than ``longer_than``."""
        self._read()
        best: FoundFile | None = None
        for key in keys:
            index = self._by_key.get(key)
            found = None if index is None else index.find(tokens, longer_than=best.usable if best else longer_than)
            if found is not None:
                entry, usable = found
                file = self._files[entry.name]
                best = FoundFile(entry.name, key, usable, file.nbytes, file.device)
        return best

    def load(self, found: FoundFile) -> PrefixSnapshot | None:
        """Return the prefix in a file, mapped into memory; None if the file is gone, or bad and now set aside."""
        path = self.path / found.name
        try:
            header, snapshot = read_snapshot(path)
            _check_name(path, _key_of(header), encode_tokens(snapshot.input_ids[0]))  # type: ignore[index]
            os.utime(path)  # used now
        except FileNotFoundError:
            self._forget(found.name)
            return None
        except PrefixCacheError:
            self._set_aside(found.name)
            return None
        return snapshot

    def save(self, key: Key, snapshot: PrefixSnapshot) -> bool:
        """Write ``snapshot`` unless it is there; return whether it is there now.

        What was used least recently makes room. What alone is larger than the budget is not written, nor what other
        writers hold up for long.
        """
        if snapshot.input_ids is None:
            return False
        name = _name(key, encode_tokens(snapshot.input_ids[0]))
        path = self.path / name
        try:
            os.utime(path)
        except FileNotFoundError:
            pass
        else:
            return True
        prepared = prepare_snapshot(snapshot, namespace=key.namespace)
        if prepared.nbytes > self.max_bytes:
            return False
        try:
            with self._lock.acquire(timeout=_PATIENCE):
                self._remove_leftovers()
                self._prune(self.max_bytes - prepared.nbytes)
                prepared.write(path)
        except (filelock.Timeout, OSError):  # a full or lost disk must not stop what computes
            return path.exists()
        return True

    def discard(self, fingerprint: str) -> None:
        """Remove the files of one model state."""
        self._read()
        for name in [name for name, file in self._files.items() if file.key.fingerprint == fingerprint]:
            self._remove(name)

    def clear(self) -> None:
        """Remove all files of prefixes."""
        self._read()
        for name in list(self._files):
            self._remove(name)

    def prune(self, max_bytes: int) -> list[str]:
        """Remove what was used least recently until the files take at most ``max_bytes``, and all that was set aside.

        Returns:
            Names of the files that are gone.

        Raises:
            filelock.Timeout: Other writers hold the directory.
        """
        with self._lock.acquire(timeout=_PATIENCE):
            before = set(self._names())
            self._remove_leftovers()
            self._prune(max_bytes)
            aside = self.path / _ASIDE
            bad = sorted(aside.iterdir()) if aside.is_dir() else []
            for path in bad:
                path.unlink(missing_ok=True)
            return [*sorted(before - set(self._names())), *(f"{_ASIDE}/{path.name}" for path in bad)]

    def check(self) -> None:
        """Check that what is there is known, and indexed once. Nobody writes meanwhile, but others may remove files.

        Raises:
            filelock.Timeout: Other writers hold the directory.
            StoreIntegrityError: It is not.
        """
        with self._lock.acquire(timeout=_PATIENCE):
            self._seen = None
            self._read()
            unknown = set(self._names()) - self._files.keys()
        indexed = sorted(entry.name for index in self._by_key.values() for entry in index)
        if indexed != sorted(self._files) or unknown:
            raise StoreIntegrityError(
                f"the files in {self.path} differ from those indexed; this is a defect of hf-prefix-cache: report it"
            )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _names(self) -> Iterator[str]:
        return (entry.name for entry in os.scandir(self.path) if _NAME.fullmatch(entry.name))

    def _read(self) -> None:
        """Learn of files that came and went since the last time."""
        try:
            changed = os.stat(self.path).st_mtime_ns
        except FileNotFoundError:  # somebody removed it with all that was in it
            self.path.mkdir(parents=True, exist_ok=True)
            changed = 0
        if changed == self._seen:
            return
        self._seen = changed if time.time_ns() - changed > _TICK else None
        there = set(self._names())
        for name in self._files.keys() - there:
            self._forget(name)
        for name in sorted(there - self._files.keys()):
            path = self.path / name
            try:
                header, input_ids = read_snapshot_header(path)
                key, tokens, nbytes = _key_of(header), encode_tokens(input_ids[0]), os.stat(path).st_size
                _check_name(path, key, tokens)
            except FileNotFoundError:
                continue
            except PrefixCacheError:
                self._set_aside(name)
                continue
            self._files[name] = _File(key, nbytes, header.device)
            self._by_key.setdefault(key, TokenIndex()).add(Indexed(tokens, name, header.floor))

    def _prune(self, max_bytes: int) -> None:
        """Remove what was used least recently until the files take at most ``max_bytes``."""
        files = []
        for entry in os.scandir(self.path):
            if _NAME.fullmatch(entry.name) and not entry.is_symlink():
                state = entry.stat()
                files.append((state.st_mtime_ns, state.st_size, entry.name))
        total = sum(size for _, size, _ in files)
        for _, size, name in sorted(files):
            if total <= max_bytes:
                break
            self._remove(name)
            total -= size

    def _remove_leftovers(self) -> None:
        """Remove what writers that were killed left behind: while the lock is held, nobody else writes."""
        for entry in os.scandir(self.path):
            if _LEFT_BEHIND.fullmatch(entry.name):
                Path(entry.path).unlink(missing_ok=True)

    def _remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)
        self._forget(name)

    def _set_aside(self, name: str) -> None:
        aside = self.path / _ASIDE
        aside.mkdir(exist_ok=True)
        try:
            os.replace(self.path / name, aside / name)
        except FileNotFoundError:  # another process was faster
            pass
        else:
            self.damaged += 1
        self._forget(name)

    def _forget(self, name: str) -> None:
        file = self._files.pop(name, None)
        if file is None:
            return
        index = self._by_key[file.key]
        index.remove(lambda entry: entry.name != name)
        if not len(index):
            del self._by_key[file.key]


def _key_of(header: SnapshotHeader) -> Key:
    return Key(header.fingerprint, header.namespace, header.lossy_key)


def _name(key: Key, tokens: bytes) -> str:
    told = repr((key.fingerprint, key.namespace, key.lossy_strategy)).encode()
    return f"{hashlib.sha256(told + tokens).hexdigest()[:32]}.safetensors"


def _check_name(path: Path, key: Key, tokens: bytes) -> None:
    if path.name != _name(key, tokens):
        raise SnapshotFileError(
            f"{path} cannot be used: its token ids or its model are not those that its name stands for; it was "
            "renamed, or made by something else"
        )
