"""`PrefixStore`: computed prefixes, found by their tokens, within a budget of bytes."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence

import torch

from ..exceptions import BatchSizeError, InvalidBudgetError
from ..snapshot import PrefixSnapshot
from ..validation import check_token_ids
from .blocks import copy_blocks
from .entry import Entry, Key, Layout
from .integrity import check_integrity
from .node import Boundary, Node
from .stats import StoreStats
from .tokens import encode_tokens
from .tree import PrefixTree, Walk

__all__ = ["PrefixStore"]

_COUNTED = (
    *("hits", "partial_hits", "misses", "tokens_reused", "tokens_missed"),
    *("insertions", "refusals", "evictions"),
)


class PrefixStore:
    """Computed prefixes in memory, as radix trees over their token ids.

    Tokens that several prefixes share are held once. What is matched is a prefix of any length, exact in all of its
    bits, and never one of another model, model state or namespace. Where a prefix cannot be given exactly, because a
    window has moved on or a running state has been overwritten, the longest stored one that can is.

    All methods may be called from several threads. A prefix that was handed out stays valid when it is evicted.

    Args:
        max_bytes: Budget for the tensors held: keys, values and next logits. Token ids, 8 bytes each, come on top.

    Raises:
        InvalidBudgetError: ``max_bytes`` is not a positive integer.

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

    def __init__(self, *, max_bytes: int) -> None:
        self.max_bytes = _check_bytes("max_bytes", max_bytes, lowest=1)
        self._lock = threading.RLock()
        self._trees: dict[Key, dict[Layout, PrefixTree]] = {}
        # Everything that can be evicted with its tree, least recently used first. A node is always used together with
        # those before it and after its boundary, and moved behind them, so the first one has nothing that hangs on it.
        self._recency: OrderedDict[Node | Boundary, PrefixTree] = OrderedDict()
        self._bytes = self._entries = 0
        self._counts: Counter[str] = Counter()

    def __len__(self) -> int:
        """Return the number of stored prefixes."""
        with self._lock:
            return self._entries

    def __repr__(self) -> str:
        return f"PrefixStore({len(self)} prefixes, {self.nbytes / 1e6:.1f} of {self.max_bytes / 1e6:.1f} MB)"

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors held."""
        with self._lock:
            return self._bytes

    def insert(self, snapshot: PrefixSnapshot, namespace: str = "") -> bool:
        """Keep ``snapshot``. Tokens that are held already are not stored again, the others are copied.

        What was used least recently makes room. A snapshot that alone is larger than the budget is refused, which
        changes nothing but ``stats().refusals``: storing is an offer, and generation goes on without it.

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
        key = Key(str(snapshot.fingerprint), namespace, snapshot.lossy_key)
        with self._lock:
            if entry.nbytes > self.max_bytes:
                self._counts["refusals"] += 1
                return False
            walk = self._make_room(key, entry)
            # All that may fail for want of memory comes before the tree is touched.
            blocks = copy_blocks(entry.sliceable, walk.length, entry.length)
            boundary = walk.boundary if walk.length == entry.length else None
            known = 0 if boundary is None else boundary.nbytes
            is_new = boundary is None
            if boundary is None:
                boundary = Boundary(entry.length, entry.others)
            if boundary.next_logits is None and entry.next_logits is not None:
                boundary.keep_logits(entry.next_logits)
            tree = self._trees.setdefault(key, {}).setdefault(
                entry.layout, PrefixTree(key, [layer.is_sliceable for layer in snapshot.layers], snapshot.config)
            )
            node = tree.extend(walk, entry.tokens, blocks, snapshot.strategy)
            if is_new:
                tree.set_boundary(node, boundary)
            self._touch(tree, node, boundary)
            self._bytes += sum(block.nbytes for block in blocks) + boundary.nbytes - known
            self._entries += is_new
            self._counts["insertions"] += 1
            return True

    def match(
        self,
        input_ids: torch.Tensor | Sequence[int],
        fingerprint: str,
        namespace: str = "",
        *,
        strategy: str | None = None,
    ) -> PrefixSnapshot | None:
        """Return the longest stored prefix of ``input_ids`` that can be given exactly, or None.

        It was used now: it and all that it shares are the last to be evicted.

        Args:
            input_ids: Token ids of a prompt, ``[tokens]`` or ``[1, tokens]``.
            fingerprint: Of the model that is to continue the prefix, `hpc.fingerprint_of`.
            namespace: The tenant who asks.
            strategy: `PrefixSnapshot.lossy_key` of lossy prefixes that may be given too; exact ones always may.

        Returns:
            A snapshot on the store's own tensors (no copy) on the device where they were inserted. Its
            ``next_logits`` are there if a snapshot that had them ended at this very length.

        Raises:
            InvalidTokensError: Ids that are empty or not integers.
            BatchSizeError: Several rows.
        """
        ids = check_token_ids(input_ids)
        if ids.shape[0] != 1:
            raise BatchSizeError(f"input_ids has {ids.shape[0]} rows; match one row at a time")
        ids, total = ids.cpu(), ids.shape[1]
        tokens = encode_tokens(ids[0])
        with self._lock:
            found = max(
                (tree.find(tokens) for tree in self._candidates(fingerprint, namespace, strategy)),
                key=lambda candidate: candidate.length,
                default=None,
            )
            length = 0 if found is None else found.length
            self._counts["hits" if length == total else "partial_hits" if length else "misses"] += 1
            self._counts["tokens_reused"] += length
            self._counts["tokens_missed"] += total - length
            if found is None or not length:
                return None
            self._touch(found.tree, found.nodes[-1], found.boundary)
            with torch.inference_mode(False):  # ids made in inference mode could not be trained on
                return found.tree.snapshot(found, ids[:, :length].clone())

    def evict(self, nbytes: int = 1) -> int:
        """Drop what was used least recently until at least ``nbytes`` are freed or nothing is left.

        The tensors are freed at once, but for those that a snapshot handed out earlier still holds.

        Args:
            nbytes: Bytes to free; by default as little as possible.

        Returns:
            The bytes freed.

        Raises:
            InvalidBudgetError: ``nbytes`` is not an integer of 0 or more.
        """
        _check_bytes("nbytes", nbytes, lowest=0)
        with self._lock:
            freed = 0
            while freed < nbytes and self._recency:
                item, tree = next(iter(self._recency.items()))
                for gone, size in tree.drop(item):
                    self._forget(gone, size)
                    self._counts["evictions"] += isinstance(gone, Boundary)
                    freed += size
                if not tree.root.children:
                    self._remove_tree(tree)
            return freed

    def discard(self, fingerprint: str) -> int:
        """Drop everything that was computed by the model state ``fingerprint``, in all namespaces.

        Returns:
            The bytes freed.
        """
        with self._lock:
            before = self._bytes
            for key in [key for key in self._trees if key.fingerprint == fingerprint]:
                for tree in self._trees.pop(key).values():
                    for node in tree.root.downwards():
                        for item in node.items:
                            self._forget(item, item.nbytes)
            return before - self._bytes

    def clear(self) -> None:
        """Drop everything; what `stats` has counted stays."""
        with self._lock:
            self._trees.clear()
            self._recency.clear()
            self._bytes = self._entries = 0

    def stats(self) -> StoreStats:
        """Return what the store has done and holds."""
        with self._lock:
            counts = {name: self._counts[name] for name in _COUNTED}
            return StoreStats(**counts, entries=self._entries, bytes=self._bytes, max_bytes=self.max_bytes)

    def sanity_check(self) -> None:
        """Check tree shape, block sizes, byte accounting and eviction order. Takes time; made for tests.

        Raises:
            StoreIntegrityError: Something is inconsistent: a defect of this package.
        """
        with self._lock:
            check_integrity(
                self._trees, self._recency, nbytes=self._bytes, entries=self._entries, max_bytes=self.max_bytes
            )

    # -- inside ------------------------------------------------------------------------------------------------------

    def _make_room(self, key: Key, entry: Entry) -> Walk:
        """Evict until ``entry`` fits; return how far its tokens lead into what is left."""
        while True:
            tree = self._trees.get(key, {}).get(entry.layout)
            walk = Walk([], 0) if tree is None else tree.walk(entry.tokens)
            boundary = walk.boundary if walk.length == entry.length else None
            cost = (entry.length - walk.length) * entry.token_bytes
            cost += entry.end_bytes if boundary is None else 0
            cost += entry.logits_bytes if boundary is None or boundary.next_logits is None else 0
            excess = self._bytes + cost - self.max_bytes
            if excess <= 0:
                return walk
            # What the entry shares is evicted last, and then all the same: it comes with the snapshot. A run of which
            # it shares only a part waits in line like any other.
            whole = [node for node in walk.nodes if node.end <= walk.length]
            if tree is not None and whole:
                self._touch(tree, whole[-1], boundary)
            self.evict(excess)

    def _candidates(self, fingerprint: str, namespace: str, strategy: str | None) -> Iterator[PrefixTree]:
        if strategy is not None:
            yield from self._trees.get(Key(fingerprint, namespace, strategy), {}).values()
        yield from self._trees.get(Key(fingerprint, namespace, None), {}).values()

    def _touch(self, tree: PrefixTree, node: Node, boundary: Boundary | None) -> None:
        """Move ``boundary``, ``node`` and all before them to the end of the line, those before last."""
        chain: list[Node | Boundary] = [] if boundary is None else [boundary, *boundary.node.upwards()]
        for item in (*chain, *node.upwards()):
            self._recency[item] = tree
            self._recency.move_to_end(item)

    def _forget(self, item: Node | Boundary, nbytes: int) -> None:
        del self._recency[item]
        self._bytes -= nbytes
        self._entries -= isinstance(item, Boundary)

    def _remove_tree(self, tree: PrefixTree) -> None:
        layouts = self._trees[tree.key]
        for layout in [layout for layout, held in layouts.items() if held is tree]:
            del layouts[layout]
        if not layouts:
            del self._trees[tree.key]


def _check_bytes(name: str, value: int, *, lowest: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise InvalidBudgetError(f"{name} is {value!r}; it is a number of bytes, an integer of {lowest} or more")
    return value
