"""Random sequences of operations on caches of one model, each feed compared with the uncached model."""

from __future__ import annotations

import random
from typing import Any

import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.oracle import Oracle, continued

__all__ = ["RandomSequence"]

_MOST_TOKENS = 30
_MOST_ROWS = 3
_CACHES = 4
_SNAPSHOTS = 4


class RandomSequence:
    """A few caches and snapshots, and for each the token lists that it must hold.

    Args:
        model: The model, in evaluation mode.
        seed: Decides every step.
        static: Whether the caches are static; they then keep their number of rows.
    """

    def __init__(self, model: Any, seed: int, *, static: bool = False) -> None:
        self.model, self.static, self.rng = model, static, random.Random(seed)
        self.oracle = Oracle(model)
        self.caches: list[tuple[Any, list[tuple[int, ...]]]] = []
        self.snapshots: list[tuple[Any, list[tuple[int, ...]]]] = []
        self.compared = 0
        self.log: list[str] = []

    def run(self, steps: int) -> None:
        """Take ``steps`` steps.

        Raises:
            AssertionError: A cache gave other logits than the uncached model; the message holds the last steps.
        """
        operations = [self._feed] * 6 + [
            self._new,
            self._snapshot,
            self._restore,
            self._fork,
            self._crop,
            self._reorder,
        ]
        operations += [self._from_snapshot, self._reset]
        with torch.no_grad():
            for _ in range(steps):
                if not self.caches:
                    self._new()
                self.rng.choice(operations)()

    def _feed(self) -> None:
        place = self.rng.randrange(len(self.caches))
        cache, rows = self.caches[place]
        tokens = self.rng.choice([1, 1, 2, 3, 7])
        held = len(rows[0]) if rows else 0
        if held + tokens > _MOST_TOKENS:
            return self._reset(place)
        count = len(rows) or 1
        new = [tuple(self.rng.randrange(3, 99) for _ in range(tokens)) for _ in range(count)]
        before = rows or [()] * count
        self.log.append(f"feed {tokens} to cache {place}, which holds {held}")
        logits = continued(self.model, cache, new)
        for row, own, added in zip(logits, before, new, strict=True):
            deviation, tolerance = self.oracle.judge(row, self.oracle.after(own, added), own, added)
            self.compared += 1
            assert deviation <= tolerance, f"off by {deviation:.2g} after\n" + "\n".join(self.log[-30:])
        self.caches[place] = cache, [own + added for own, added in zip(before, new, strict=True)]
        self.oracle._known.clear()
        return None

    def _new(self) -> None:
        if self.static:
            cache: Any = hpc.PrefixStaticCache(config=self.model.config, max_cache_len=_MOST_TOKENS)
        else:
            cache = hpc.PrefixDynamicCache(config=self.model.config)
        self._add(cache, [])
        self.log.append("new cache")

    def _add(self, cache: Any, rows: list[tuple[int, ...]]) -> None:
        self.caches.append((cache, rows))
        if len(self.caches) > _CACHES:
            self.caches.pop(self.rng.randrange(_CACHES))

    def _snapshot(self) -> None:
        cache, rows = self.rng.choice(self.caches)
        if rows:
            self.log.append(f"snapshot of {len(rows)} rows of {len(rows[0])}")
            self.snapshots.append((cache.snapshot(), list(rows)))
            if len(self.snapshots) > _SNAPSHOTS:
                self.snapshots.pop(self.rng.randrange(_SNAPSHOTS))

    def _restore(self) -> None:
        if not self.snapshots:
            return
        snapshot, rows = self.rng.choice(self.snapshots)
        place = self.rng.randrange(len(self.caches))
        cache, held = self.caches[place]
        if self.static and held and len(rows) > len(held):
            return
        self.log.append(f"restore {len(rows)} rows of {len(rows[0])} into cache {place}")
        try:
            cache.restore(snapshot)
        except hpc.BatchSizeError:
            assert self.static  # its buffers were made for fewer rows
            return
        self.caches[place] = cache, list(rows)

    def _from_snapshot(self) -> None:
        if self.snapshots:
            snapshot, rows = self.rng.choice(self.snapshots)
            count = self.rng.randint(1, _MOST_ROWS) if len(rows) == 1 else len(rows)
            options = {"max_cache_len": _MOST_TOKENS} if self.static else {}
            self.log.append(f"cache of {count} rows from a snapshot of {len(rows[0])}")
            self._add(snapshot.to_cache(batch_size=count, **options), rows * count if len(rows) == 1 else list(rows))

    def _fork(self) -> None:
        cache, rows = self.rng.choice(self.caches)
        count = self.rng.randint(1, _MOST_ROWS) if len(rows) == 1 else None
        self.log.append(f"fork of {len(rows)} rows into {count}")
        self._add(cache.fork(count), rows * count if count else list(rows))

    def _crop(self) -> None:
        place = self.rng.randrange(len(self.caches))
        cache, rows = self.caches[place]
        if not rows:
            return
        length = self.rng.randint(0, len(rows[0]))
        if not cache.can_crop_to(length):
            try:
                cache.crop_to(length)
            except hpc.NotCroppableError:
                return
            raise AssertionError(f"can_crop_to({length}) said no, and crop_to did it")
        self.log.append(f"crop cache {place} from {len(rows[0])} to {length}")
        cache.crop_to(length)
        self.caches[place] = cache, [row[:length] for row in rows] if length else []

    def _reorder(self) -> None:
        place = self.rng.randrange(len(self.caches))
        cache, rows = self.caches[place]
        if rows:
            count = len(rows) if self.static else self.rng.randint(1, _MOST_ROWS)
            order = [self.rng.randrange(len(rows)) for _ in range(count)]
            self.log.append(f"reorder cache {place} to {order}")
            cache.reorder_cache(torch.tensor(order))
            self.caches[place] = cache, [rows[index] for index in order]

    def _reset(self, place: int | None = None) -> None:
        place = self.rng.randrange(len(self.caches)) if place is None else place
        self.log.append(f"reset cache {place}")
        self.caches[place][0].reset()
        self.caches[place] = self.caches[place][0], []
