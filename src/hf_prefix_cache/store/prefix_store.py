"""`PrefixStore`: computed prefixes, found by their tokens, within budgets of bytes."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from ..exceptions import BatchSizeError, CacheCapacityError, InvalidBudgetError
from ..snapshot import PrefixSnapshot
from ..validation import check_token_ids
from .directory import SnapshotDirectory
from .entry import Entry, Key
from .lower_tiers import LowerTiers
from .memory_tier import MemoryTier
from .stats import StoreStats, TierStats
from .tokens import encode_tokens

__all__ = ["PrefixStore"]

_DIRECTORY_FACTOR = 10  # how much more a directory may take than memory, unless a number is given


class PrefixStore:
    """Computed prefixes, as radix trees over their token ids: in memory, and on request in a directory.

    Tokens that several prefixes share are held once. What is matched is a prefix of any length, exact in all of its
    bits, and never one of another model, model state or namespace. Where a prefix cannot be given exactly, because a
    window has moved on or a running state has been overwritten, the longest stored one that can is.

    What is evicted from an accelerator goes to host memory, and what is evicted from memory goes to the directory.
    From there it comes back when a prompt asks for it, unless computing it again is faster. Several processes may use
    one directory.

    All methods may be called from several threads. A prefix that was handed out stays valid when it is evicted.

    Args:
        max_bytes: Budget for the tensors held where models compute: keys, values and next logits. Token ids, 8 bytes
            each, come on top.
        max_host_bytes: The same for host memory, where prefixes go that leave an accelerator; by default one eighth of
            what is free when the first one does. 0 for none.
        directory: A folder for prefixes that leave memory, made if it is not there; None for none.
        max_directory_bytes: Budget for the files in it; by default ten times ``max_bytes``.

    Raises:
        InvalidBudgetError: A budget is not an integer in its range, or one is given for a directory that is not.

    Example:
        >>> import torch, hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
        >>> ids = torch.tensor([[1, 2, 3, 4]])
        >>> cache = hpc.PrefixDynamicCache(config=model.config)
        >>> _ = model(ids, past_key_values=cache)
        >>> snapshot = cache.snapshot(model=model, input_ids=ids)
        >>> store = hpc.PrefixStore(max_bytes=1_000_000)
        >>> store.insert(snapshot)
        True
        >>> store.match([1, 2, 9], snapshot.fingerprint).seq_length
        2
    """

    def __init__(
        self,
        *,
        max_bytes: int,
        max_host_bytes: int | None = None,
        directory: Path | str | None = None,
        max_directory_bytes: int | None = None,
    ) -> None:
        self.max_bytes = _check_bytes("max_bytes", max_bytes, lowest=1)
        if max_host_bytes is not None:
            _check_bytes("max_host_bytes", max_host_bytes, lowest=0)
        if max_directory_bytes is not None:
            _check_bytes("max_directory_bytes", max_directory_bytes, lowest=1)
            if directory is None:
                raise InvalidBudgetError(
                    f"max_directory_bytes is {max_directory_bytes} but no directory is given; pass directory=..."
                )
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        files = None
        if directory is not None:
            files = SnapshotDirectory(
                Path(directory).expanduser(), max_directory_bytes or _DIRECTORY_FACTOR * max_bytes
            )
        self._lower = LowerTiers(files, max_host_bytes=max_host_bytes)
        self._memory = MemoryTier(self.max_bytes, self._lower.take_in)

    def __len__(self) -> int:
        """Return the number of prefixes stored where models compute."""
        with self._lock:
            return self._memory.entries

    def __repr__(self) -> str:
        return f"PrefixStore({len(self)} prefixes, {self.nbytes / 1e6:.1f} of {self.max_bytes / 1e6:.1f} MB)"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held where models compute."""
        with self._lock:
            return self._memory.nbytes

    def insert(self, snapshot: PrefixSnapshot, namespace: str = "") -> bool:
        """Keep ``snapshot``. Tokens that are held already are not stored again, the others are copied.

        What was used least recently makes room. A snapshot that alone is larger than the budget, or than what pinned
        prefixes leave of it, is refused, which changes nothing but ``stats().refusals``: storing is an offer, and
        generation goes on without it.

        Args:
            snapshot: A prefix of one row without padding, with token ids and fingerprint. It is neither changed nor
                kept.
            namespace: Its tenant; other tenants never see it.

        Returns:
            Whether it is stored now.

        Raises:
            SnapshotIncompleteError: It lacks token ids or a fingerprint, or has padding.
            BatchSizeError: It has several rows.
            InputMismatchError, InvalidTokensError: Its token ids and layers do not fit each other.
        """
        entry = Entry.of(snapshot)
        with self._lock:
            return self._memory.insert(Key.of(snapshot, namespace), entry, snapshot)

    def pin(self, snapshot: PrefixSnapshot, namespace: str = "") -> None:
        """Keep ``snapshot`` until `unpin`: nothing evicts it. Pins are counted.

        Raises:
            CacheCapacityError: It does not fit into the budget, beside what is pinned already.
            SnapshotIncompleteError, BatchSizeError, InputMismatchError, InvalidTokensError: As for `insert`.
        """
        entry, key = Entry.of(snapshot), Key.of(snapshot, namespace)
        with self._lock:
            if not self._memory.insert(key, entry, snapshot):
                raise CacheCapacityError(
                    f"the snapshot takes {entry.nbytes} bytes and max_bytes of the store is {self.max_bytes}, with "
                    f"{self._memory.pinned} prefixes pinned; make a store with a larger max_bytes, or unpin some"
                )
            self._memory.pin(key, entry)

    def unpin(self, snapshot: PrefixSnapshot, namespace: str = "") -> bool:
        """Take one `pin` of ``snapshot`` back; return whether there was one."""
        entry = Entry.of(snapshot)
        with self._lock:
            return self._memory.unpin(Key.of(snapshot, namespace), entry)

    def match(
        self,
        input_ids: torch.Tensor | Sequence[int],
        fingerprint: str,
        namespace: str = "",
        *,
        strategy: str | None = None,
        device: torch.device | None = None,
    ) -> PrefixSnapshot | None:
        """Return the longest stored prefix of ``input_ids`` that can be given exactly, or None.

        It was used now: it and all that it shares are the last to be evicted. Where host memory or the directory hold
        a longer one, it comes back from there, unless computing it again is faster.

        Args:
            input_ids: Token ids of a prompt, ``[tokens]`` or ``[1, tokens]``.
            fingerprint: Of the model that is to continue the prefix, `hpc.fingerprint_of`.
            namespace: The tenant who asks.
            strategy: `PrefixSnapshot.lossy_key` of lossy prefixes that may be given too; exact ones always may.
            device: Where the prefix has to be; by default where it was when it was inserted.

        Returns:
            A snapshot on the store's own tensors (no copy). Its ``next_logits`` are there if a snapshot that had them
            ended at this very length.

        Raises:
            InvalidTokensError: Ids that are empty or not integers.
            BatchSizeError: Several rows.
        """
        ids, tokens, keys = _prepare(input_ids, fingerprint, namespace, strategy)
        with self._lock:
            found, _ = self._memory.find(keys, tokens, device)
            length = 0 if found is None else found.length
            returned = None
            if length < ids.shape[1]:
                returned = self._lower.bring_back(keys, ids, tokens, device, longer_than=length)
                if returned is not None:
                    length = returned.seq_length
                    self._memory.insert(Key.of(returned, namespace), Entry.of(returned), returned)
                    found, _ = self._memory.find(keys, tokens, device)
            self._counts["hits" if length == ids.shape[1] else "partial_hits" if length else "misses"] += 1
            self._counts["tokens_reused"] += length
            self._counts["tokens_missed"] += ids.shape[1] - length
            if found is not None and found.length >= length:
                return self._memory.take(found, ids)
            return returned  # it is too large for the budget

    def branch_point(
        self,
        input_ids: torch.Tensor | Sequence[int],
        fingerprint: str,
        namespace: str = "",
        *,
        strategy: str | None = None,
        device: torch.device | None = None,
    ) -> int:
        """Return how many first tokens a stored prefix has in common with ``input_ids`` though it cannot give them.

        Windows and running states can be continued from the end of a stored prefix only. Where two prompts part is a
        point worth a snapshot: who computes the second prompt keeps one there, and the third starts from it.

        Args:
            input_ids: Token ids of a prompt.
            fingerprint: As for `match`.
            namespace: As for `match`.
            strategy: As for `match`.
            device: As for `match`.

        Returns:
            The length in common, 0 where every layer can be cut anywhere.
        """
        _, tokens, keys = _prepare(input_ids, fingerprint, namespace, strategy)
        with self._lock:
            return self._memory.shared_tokens(keys, tokens, device)

    def evict(self, nbytes: int = 1) -> int:
        """Drop from memory what was used least recently until at least ``nbytes`` are freed or nothing is left.

        The tensors are freed at once, but for those that a snapshot handed out earlier still holds. Where there is a
        place for them, prefixes go there; pinned ones stay.

        Args:
            nbytes: Bytes to free where models compute; by default as little as possible.

        Returns:
            The bytes freed.

        Raises:
            InvalidBudgetError: ``nbytes`` is not an integer of 0 or more.
        """
        _check_bytes("nbytes", nbytes, lowest=0)
        with self._lock:
            return self._memory.evict(nbytes)

    def flush(self) -> int:
        """Write all prefixes in memory to the directory, so that other processes and later ones find them.

        Returns:
            Files that the directory holds for them now, written or there before; 0 without a directory.
        """
        with self._lock:
            return sum(self._lower.write(key, snapshot) for key, _, snapshot in self._memory.snapshots())

    def discard(self, fingerprint: str) -> int:
        """Drop everything that was computed by the model state ``fingerprint``, in all namespaces and places.

        Returns:
            The bytes freed where models compute.
        """
        with self._lock:
            self._lower.discard(fingerprint)
            return self._memory.discard(fingerprint)

    def clear(self, *, directory: bool = False) -> None:
        """Drop everything in memory; what `stats` has counted stays.

        Args:
            directory: Remove the files in the directory too, which other processes may use.
        """
        with self._lock:
            self._memory.clear()
            self._lower.clear(directory=directory)

    def stats(self) -> StoreStats:
        """Return what the store has done and holds."""
        with self._lock:
            memory, lower = self._memory, self._lower
            here = TierStats("memory", memory.nbytes, memory.max_bytes, memory.entries, None)
            names = ("hits", "partial_hits", "misses", "tokens_reused", "tokens_missed")
            return StoreStats(
                **{name: self._counts[name] for name in names},
                **{name: memory.counts[name] for name in ("insertions", "refusals", "evictions")},
                **{name: lower.counts[name] for name in ("returned", "recomputed")},
                entries=memory.entries,
                pinned=memory.pinned,
                bytes=memory.nbytes,
                max_bytes=memory.max_bytes,
                tiers=(here, *lower.stats()),
                damaged_files=lower.damaged_files,
                seconds_per_token=lower.speeds.seconds_per_token,
            )

    @contextmanager
    def measured(self, fingerprint: str, tokens: int, device: torch.device) -> Iterator[None]:
        """Measure, once for each model and device, how long a model takes to compute the ``tokens`` fed inside."""
        if not self._lower.exist or not self._lower.speeds.wants(fingerprint, tokens):
            yield
            return
        _wait_for(device)
        start = time.perf_counter()
        yield
        _wait_for(device)
        with self._lock:
            self._lower.speeds.computed(fingerprint, tokens, time.perf_counter() - start)

    def sanity_check(self) -> None:
        """Check tree shape, block sizes, byte accounting and eviction order. Takes time; made for tests.

        Raises:
            StoreIntegrityError: Something is inconsistent: a defect of this package.
        """
        with self._lock:
            self._memory.check()
            self._lower.check()


def _prepare(
    input_ids: torch.Tensor | Sequence[int], fingerprint: str, namespace: str, strategy: str | None
) -> tuple[torch.Tensor, bytes, list[Key]]:
    ids = check_token_ids(input_ids)
    if ids.shape[0] != 1:
        raise BatchSizeError(f"input_ids has {ids.shape[0]} rows; match one row at a time")
    ids = ids.cpu()
    lossy = [] if strategy is None else [Key(fingerprint, namespace, strategy)]
    return ids, encode_tokens(ids[0]), [*lossy, Key(fingerprint, namespace, None)]


def _wait_for(device: torch.device) -> None:
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def _check_bytes(name: str, value: int, *, lowest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise InvalidBudgetError(f"{name} is {value!r}; it is a number of bytes, an integer of {lowest} or more")
    return value
