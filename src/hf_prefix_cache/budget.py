"""The strategy of a wrapper, chosen anew for each prefix and call where it has a memory budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from .exceptions import CacheCapacityError
from .generation.strategies import CACHE_OPTIONS
from .layers.quantized_state import scheme_of
from .prefixes import compute_prefix
from .snapshot import PrefixSnapshot
from .store import store_for
from .strategy import StrategyChoice, choose_strategy

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MemoryBudget"]


class MemoryBudget:
    """Half of a number of bytes is for what is held: while a prefix is being kept, it is there twice.

    Args:
        model: The model.
        nbytes: The budget.

    Attributes:
        choice: What was chosen last; None before.
    """

    def __init__(self, model: PreTrainedModel, nbytes: int) -> None:
        self._model, self._nbytes = model, nbytes
        self.choice: StrategyChoice | None = None

    def choose(self, *, rows: int, tokens: int) -> tuple[str, dict[str, Any]]:
        """Return the strategy that keeps to the budget, and its cache's options.

        Raises:
            CacheCapacityError: None does.
        """
        half = f"half of memory_budget={self._nbytes}, since what is being kept is there twice for a moment"
        try:
            choice = choose_strategy(
                self._model, tokens=tokens, batch_size=rows, memory_budget=max(1, self._nbytes // 2)
            )
        except CacheCapacityError as error:
            raise CacheCapacityError(f"{error} ({half})") from error
        self.choice = replace(choice, reasons=(*choice.reasons, half))
        is_small = self.choice.strategy in CACHE_OPTIONS
        return (self.choice.strategy, dict(self.choice.options)) if is_small else ("prefix-auto", {})

    def choose_call(
        self, input_ids: torch.Tensor, arguments: dict[str, Any], prefix: PrefixSnapshot | None
    ) -> tuple[str, dict[str, Any]]:
        """Return the same for a call of ``generate``: that of its prefix, where the prefix is quantized."""
        scheme = None if prefix is None else scheme_of(prefix.layers)
        if prefix is not None and scheme is not None:
            return prefix.strategy, dict(scheme.options)
        settings = arguments.get("generation_config") or self._model.generation_config
        new = arguments.get("max_new_tokens") or settings.max_new_tokens or 0
        return self.choose(rows=input_ids.shape[0], tokens=input_ids.shape[1] + new)

    def prefill(self, input_ids: torch.Tensor) -> PrefixSnapshot:
        """Return a complete snapshot of ``input_ids`` ``[1, tokens]`` that shares its memory with the store's.

        Raises:
            CacheCapacityError: No strategy keeps it within the budget.
            UnsupportedModelError: As `compute_prefix`.
        """
        strategy, options = self.choose(rows=1, tokens=input_ids.shape[1])
        snapshot = compute_prefix(self._model, input_ids, strategy=strategy, options=options)
        kept = store_for(self._model).match(input_ids[0], str(snapshot.fingerprint), strategy=snapshot.lossy_key)
        is_whole = kept is not None and kept.seq_length == snapshot.seq_length and kept.next_logits is not None
        return kept if kept is not None and is_whole else snapshot
