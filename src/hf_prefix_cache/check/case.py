"""One strategy on one model: how its caches are made and filled, and what is right behind them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..caches import PrefixCache, PrefixDynamicCache, PrefixQuantizedCache, PrefixStaticCache
from ..caches.offloaded import PrefixOffloadedCache
from ..exceptions import PrefixCacheError
from ..oracle import Ids, Oracle, continued
from ..snapshot import PrefixSnapshot
from .texts import QUANTIZED_OPTIONS, Texts

__all__ = ["Case", "Findings"]


@dataclass
class Findings:
    """What the comparisons of one cell gave."""

    worst: float = 0.0
    ratio: float = 0.0  # of deviation to tolerance, in the worst comparison
    tolerance: float = 0.0
    comparisons: int = 0
    refusals: dict[str, None] = field(default_factory=dict)
    failures: dict[str, None] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)

    def add(self, deviation: float, tolerance: float) -> None:
        """Count one comparison."""
        self.comparisons += 1
        if deviation / tolerance >= self.ratio:
            self.worst, self.tolerance, self.ratio = deviation, tolerance, deviation / tolerance

    def refuse(self, error: PrefixCacheError) -> None:
        """Note a refusal by name."""
        self.refusals[f"{type(error).__name__}: {error}"] = None

    def fail(self, error: Exception) -> None:
        """Note any other error."""
        self.failures[f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"] = None


class Case:
    """A model, a strategy and the texts.

    Args:
        model: The model, in evaluation mode.
        strategy: Name of the strategy.
        oracle: What is right.
        texts: What is fed.
    """

    def __init__(self, model: Any, strategy: str, oracle: Oracle, texts: Texts) -> None:
        self.model, self.strategy, self.oracle, self.texts = model, strategy, oracle, texts
        self._filled: dict[Ids, PrefixSnapshot] = {}

    @property
    def is_quantized(self) -> bool:
        """Whether what is right is what the quantized prefix stands for."""
        return self.strategy == "prefix-quantized"

    @property
    def splits(self) -> tuple[int, ...]:
        """Lengths of prefixes."""
        if self.strategy == "prefix-dynamic":
            return self.texts.splits
        return self.texts.quantized_splits if self.is_quantized else self.texts.other_splits

    @property
    def options(self) -> dict[str, Any]:
        """Options of the strategy's caches."""
        if self.strategy == "prefix-static":
            return {"max_cache_len": len(self.texts.prefix) + 2 * len(self.texts.streams[0])}
        return {**QUANTIZED_OPTIONS, "quantize_own": False} if self.is_quantized else {}

    def new_cache(self, **options: Any) -> PrefixCache:
        """Return an empty cache of the strategy."""
        make: Any = {
            "prefix-dynamic": PrefixDynamicCache,
            "prefix-static": PrefixStaticCache,
            "prefix-quantized": PrefixQuantizedCache,
            "prefix-offloaded": PrefixOffloadedCache,
        }[self.strategy]
        cache: PrefixCache = make(config=self.model.config, **{**self.options, **options})
        return cache

    def prefix(self, split: int) -> Ids:
        """Return the first ``split`` tokens of the text."""
        return self.texts.prefix[:split]

    def filled(self, tokens: Ids, **options: Any) -> PrefixCache:
        """Return a cache of the strategy that holds ``tokens``; a quantized one holds them quantized."""
        cache = self.new_cache(**options)
        if self.is_quantized:
            exact = PrefixDynamicCache(config=self.model.config)
            continued(self.model, exact, [tokens], last_only=True)
            cache.load(exact.snapshot(), batch_size=1)
        else:
            continued(self.model, cache, [tokens], last_only=True)
        return cache

    def expected(self, prefix: Ids, suffix: Ids, *, taken_from: Ids | None = None) -> torch.Tensor:
        """Return the right logits at ``suffix`` behind ``prefix``, ``[suffix, vocab]``.

        Args:
            prefix: The prefix.
            suffix: What follows it.
            taken_from: The longer text that the prefix was cut from, where that decides how it is quantized.
        """
        if not self.is_quantized:
            return self.oracle.after(prefix, suffix)
        source = taken_from or prefix
        if source not in self._filled:
            self._filled[source] = self.filled(source).snapshot()
        decoded = self._filled[source].to_cache("prefix-dynamic", allow_lossy=True)
        decoded.crop_to(len(prefix))
        return continued(self.model, decoded, [suffix])[0].float().cpu()

    def compare(
        self, found: torch.Tensor, prefix: Ids, suffixes: list[Ids], to: Findings, *, taken_from: Ids | None = None
    ) -> None:
        """Compare logits ``[rows, tokens, vocab]`` at ``suffixes``, one a row, with what is right there."""
        for row, suffix in zip(found, suffixes, strict=True):
            right = self.expected(prefix, suffix, taken_from=taken_from)
            to.add(*self.oracle.judge(row, right, prefix, suffix))
