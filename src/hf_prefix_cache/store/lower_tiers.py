"""Where prefixes go that leave the memory in which models compute, and from where they come back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import torch

from ..snapshot import PrefixSnapshot
from .directory import SnapshotDirectory
from .entry import Entry, Key, Layout
from .memory_tier import MemoryTier
from .moving import free_host_bytes, is_on_accelerator, to_home, to_host
from .speeds import Speeds
from .stats import TierStats

__all__ = ["LowerTiers"]

_HOST_SHARE = (
    8  # what leaves an accelerator may take one eighth of the host memory that is free, unless told otherwise
)


class LowerTiers:
    """Host memory, for what leaves an accelerator, and a directory. Not for several threads at once.

    Args:
        directory: The directory, or None.
        max_host_bytes: Budget for host memory; None for a share of what is free when the first prefix comes.
    """

    def __init__(self, directory: SnapshotDirectory | None, *, max_host_bytes: int | None) -> None:
        self.counts: Counter[str] = Counter()
        self.speeds = Speeds()
        self._directory, self._max_host_bytes = directory, max_host_bytes
        self._host: MemoryTier | None = None

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return self._host is not None or self._directory is not None

    @property
    def damaged_files(self) -> int:
        """Files that were set aside."""
        return 0 if self._directory is None else self._directory.damaged

    def stats(self) -> list[TierStats]:
        """Return what each holds."""
        found = []
        if self._host is not None:
            host = self._host
            found.append(TierStats("host", host.nbytes, host.max_bytes, host.entries, self.speeds.of("host")))
        if self._directory is not None:
            files, speed = self._directory, self.speeds.of("directory")
            found.append(TierStats("directory", files.nbytes, files.max_bytes, len(files), speed))
        return found

    def take_in(self, key: Key, layout: Layout, prefix: Callable[[], PrefixSnapshot]) -> None:
        """Keep what is about to be evicted where models compute, if there is a place for it.

        Args:
            key: What it belongs to.
            layout: Where it is.
            prefix: Returns it.
        """
        goes_to_host = is_on_accelerator(layout) and self._max_host_bytes != 0
        if not goes_to_host and self._directory is None:
            return
        snapshot = prefix()
        if goes_to_host:
            if self._host is None:
                budget = self._max_host_bytes or max(1, free_host_bytes() // _HOST_SHARE)
                self._host = MemoryTier(budget, self._leave_host)
            start = time.perf_counter()
            moved = to_host(snapshot)
            self.speeds.moved("host", snapshot.nbytes, time.perf_counter() - start)
            if self._host.insert(key.from_home(layout), Entry.of(moved), moved):
                return
        self.write(key, snapshot)

    def write(self, key: Key, snapshot: PrefixSnapshot) -> bool:
        """Write a prefix to the directory; return whether it is there now."""
        return self._directory is not None and self._directory.save(key.anywhere(), snapshot)

    def bring_back(
        self, keys: list[Key], ids: torch.Tensor, tokens: bytes, device: torch.device | None, *, longer_than: int
    ) -> PrefixSnapshot | None:
        """Return the longest prefix of a prompt, if it is worth the way and longer than what is at hand.

        Args:
            keys: Where to look, the best first.
            ids: Token ids of the prompt, ``[1, tokens]``.
            tokens: The same as bytes.
            device: Where it has to be; None for where it was.
            longer_than: Tokens at hand.
        """
        snapshot = self._from_host(keys, ids, tokens, device, longer_than)
        held = longer_than if snapshot is None else snapshot.seq_length
        snapshot = self._from_directory(keys, tokens, device, held) or snapshot
        self.counts["returned"] += snapshot is not None
        return snapshot

    def discard(self, fingerprint: str) -> None:
        """Drop everything of one model state."""
        if self._host is not None:
            self._host.discard(fingerprint)
        if self._directory is not None:
            self._directory.discard(fingerprint)

    def clear(self, *, directory: bool) -> None:
        """Drop everything in host memory, and on request the files."""
        if self._host is not None:
            self._host.clear()
        if directory and self._directory is not None:
            self._directory.clear()

    def check(self) -> None:
        """Raise `StoreIntegrityError` if something is inconsistent."""
        if self._host is not None:
            self._host.check()
        if self._directory is not None:
            self._directory.check()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _leave_host(self, key: Key, _: Layout, prefix: Callable[[], PrefixSnapshot]) -> None:
        if self._directory is not None:
            self.write(key, prefix())

    def _from_host(
        self, keys: list[Key], ids: torch.Tensor, tokens: bytes, device: torch.device | None, longer_than: int
    ) -> PrefixSnapshot | None:
        best: PrefixSnapshot | None = None
        if self._host is None:
            return None
        for key in [held for held in self._host.trees if held.anywhere() in keys and held.is_for(device)]:
            found, _ = self._host.find([key], tokens, None)
            if found is None or found.length <= (longer_than if best is None else best.seq_length):
                continue
            snapshot = self._host.take(found, ids)
            if self._is_worth(keys, "host", snapshot.nbytes, found.length - longer_than):
                start = time.perf_counter()
                best = to_home(snapshot, key.home)
                self.speeds.moved("host", snapshot.nbytes, time.perf_counter() - start)
        return best

    def _from_directory(
        self, keys: list[Key], tokens: bytes, device: torch.device | None, longer_than: int
    ) -> PrefixSnapshot | None:
        if self._directory is None:
            return None
        file = self._directory.find(keys, tokens, longer_than=longer_than)
        if file is None or not self._is_worth(keys, "directory", file.nbytes, file.usable - longer_than):
            return None
        start = time.perf_counter()
        loaded = self._directory.load(file)
        if loaded is None:
            return None
        snapshot = loaded.crop_to(file.usable).to(device or file.device)
        self.speeds.moved("directory", file.nbytes, time.perf_counter() - start)
        return snapshot

    def _is_worth(self, keys: list[Key], tier: str, nbytes: int, tokens: int) -> bool:
        is_worth = self.speeds.is_worth(tier, keys[0].fingerprint, nbytes, tokens)
        self.counts["recomputed"] += not is_worth
        return is_worth
