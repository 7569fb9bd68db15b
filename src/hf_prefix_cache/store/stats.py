"""What a store has done and holds."""

from dataclasses import dataclass

__all__ = ["StoreStats"]


@dataclass(frozen=True)
class StoreStats:
    """Counts since a store was made, and what it holds now.

    Attributes:
        hits: Prompts that were found whole.
        partial_hits: Prompts of which a prefix was found.
        misses: Prompts of which nothing was found.
        tokens_reused: Tokens of all prompts that were found.
        tokens_missed: Tokens of all prompts that were not.
        insertions: Snapshots that were stored, or were there already.
        refusals: Snapshots that alone are larger than the budget.
        evictions: Stored prefixes that were dropped for room; what others share of them stays.
        entries: Stored prefixes whose end is still known.
        bytes: Bytes of the tensors held.
        max_bytes: The budget.

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
    entries: int
    bytes: int
    max_bytes: int
