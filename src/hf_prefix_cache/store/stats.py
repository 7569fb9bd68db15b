"""What a store has done and holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["StoreStats", "TierStats"]


@dataclass(frozen=True)
class TierStats:
    """What one place of a store holds.

    Attributes:
        name: ``"memory"`` (where models compute), ``"host"`` or ``"directory"``.
        bytes: Bytes held.
        max_bytes: Its budget.
        entries: Prefixes whose end is known.
        bytes_per_second: What was measured on the way from there and to there; None before that.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> hpc.PrefixStore(max_bytes=1_000_000).stats().tiers[0]
        TierStats(name='memory', bytes=0, max_bytes=1000000, entries=0, bytes_per_second=None)
    """

    name: str
    bytes: int
    max_bytes: int
    entries: int
    bytes_per_second: float | None


@dataclass(frozen=True)
class StoreStats:
    """Counts since a store was made, and what it holds now. ``rich.print`` shows it as a table.

    Attributes:
        hits: Prompts that were found whole.
        partial_hits: Prompts of which a prefix was found.
        misses: Prompts of which nothing was found.
        tokens_reused: Tokens of all prompts that were found.
        tokens_missed: Tokens of all prompts that were not.
        insertions: Snapshots that were stored, or were there already.
        refusals: Snapshots that alone are larger than the budget, or than pinned prefixes leave of it.
        evictions: Prefixes that left memory for room; what others share of them stays.
        returned: Prefixes that came back from host memory or the directory.
        recomputed: Prefixes that did not, since computing them again is faster.
        entries: Prefixes in memory whose end is known.
        pinned: Those that are never evicted.
        bytes: Bytes of the tensors held where models compute.
        max_bytes: The budget for them.
        tiers: The same for each place: memory, host memory, directory.
        damaged_files: Files that could not be read and were set aside.
        seconds_per_token: What the model that was measured last takes for a token; None before that.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> store = hpc.PrefixStore(max_bytes=1_000_000)
        >>> store.match([1, 2, 3], "fingerprint of a model") is None
        True
        >>> store.stats().misses
        1
    """

    hits: int
    partial_hits: int
    misses: int
    tokens_reused: int
    tokens_missed: int
    insertions: int
    refusals: int
    evictions: int
    returned: int
    recomputed: int
    entries: int
    pinned: int
    bytes: int
    max_bytes: int
    tiers: tuple[TierStats, ...]
    damaged_files: int
    seconds_per_token: float | None

    def __rich__(self) -> Table:
        """Return the counts as a table for the terminal."""
        from rich.filesize import decimal
        from rich.table import Table

        table = Table("", "", title="Prefix store", show_header=False)
        asked = self.hits + self.partial_hits + self.misses
        tokens = self.tokens_reused + self.tokens_missed
        table.add_row("prompts", f"{asked:,}: {self.hits:,} whole, {self.partial_hits:,} in part, {self.misses:,} new")
        share = f" ({self.tokens_reused / tokens:.0%})" if tokens else ""
        table.add_row("tokens", f"{self.tokens_reused:,} reused of {tokens:,}{share}")
        kept = f"{self.insertions:,} stored, {self.refusals:,} refused, {self.evictions:,} evicted"
        table.add_row("prefixes", f"{kept}, {self.pinned:,} pinned")
        for tier in self.tiers:
            speed = "" if tier.bytes_per_second is None else f", {decimal(int(tier.bytes_per_second))}/s"
            size = f"{decimal(tier.bytes)} of {decimal(tier.max_bytes)}"
            table.add_row(tier.name, f"{tier.entries:,} prefixes, {size}{speed}")
        if len(self.tiers) > 1:
            table.add_row("came back", f"{self.returned:,}, {self.recomputed:,} were faster to compute")
        if self.damaged_files:
            table.add_row("damaged files", f"{self.damaged_files:,}, set aside")
        if self.seconds_per_token is not None:
            table.add_row("computing", f"{self.seconds_per_token * 1e3:.2f} ms a token")
        return table
