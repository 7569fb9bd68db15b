"""What is right: the uncached model, row by row. And what plain Transformers makes of a cached prefix.

`check`, the scorer's self-check and the trial of ``prefix-auto`` judge by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from transformers import DynamicCache

from .architectures import resumes_in_one_call, runs_on_static_caches
from .caches import PrefixCache
from .compat import CACHE_ARGUMENT, cache_argument, decoder_config, forget_rotary_state, layer_specs
from .forward import takes_single_tokens
from .tolerance import TOLERANCES, differences, judged_dtype, typical_difference
from .weights import input_device

__all__ = ["Ids", "Oracle", "continued"]

Ids = tuple[int, ...]
_ROUNDING = 3e-5  # of the largest logit: what plain Transformers may be off by to count as rounding
_LEAST_ROUNDING = 1e-3


class Oracle:
    """Uncached logits of rows, remembered, and the judgement on others."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = input_device(model)
        self._known: dict[tuple[Ids, int], torch.Tensor] = {}
        self._plain: dict[tuple[Ids, Ids], float] = {}

    def after(self, prefix: Ids, suffix: Ids) -> torch.Tensor:
        """Return the uncached logits at the tokens of ``suffix``, ``[suffix, vocab]`` on the CPU."""
        row, kept = prefix + suffix, len(suffix)
        if (row, kept) not in self._known:
            forget_rotary_state(self.model)
            ids = torch.tensor([row], device=self.device)
            options = {"use_cache": False, "return_dict": True, **_last_only(self.model, kept)}
            logits = self.model(input_ids=ids, **options).logits
            self._known[row, kept] = logits[0, -kept:].float().cpu()
        return self._known[row, kept]

    def judge(self, found: torch.Tensor, expected: torch.Tensor, prefix: Ids, suffix: Ids) -> tuple[float, float]:
        """Return how far ``found`` is from ``expected``, ``[tokens, vocab]``, and how far rounding may take it."""
        apart = differences(expected, found.float().cpu())
        return self.judge_rows(apart, [(prefix, suffix)], largest=float(expected.abs().max()))

    def judge_rows(
        self, apart: torch.Tensor, rows: Iterable[tuple[Ids, Ids]], *, largest: float
    ) -> tuple[float, float]:
        """Return the one of the differences ``apart`` that counts, and how far rounding may take it.

        Args:
            apart: Absolute differences of logits or log-probabilities, of any shape.
            rows: The prefixes and suffixes that they were found at. Plain Transformers runs them where the usual
                tolerance does not do.
            largest: The largest of the right values.
        """
        dtype = judged_dtype(self.model)
        deviation, tolerance = typical_difference(apart, dtype), TOLERANCES[dtype]
        if tolerance < deviation < torch.inf:
            plain = max(self._plain_deviation(prefix, suffix) for prefix, suffix in rows)
            if plain <= max(_LEAST_ROUNDING, _ROUNDING * largest) or dtype.itemsize < 4:
                tolerance = max(tolerance, 2 * plain)
        return deviation, tolerance

    def _plain_deviation(self, prefix: Ids, suffix: Ids) -> float:
        """Return how far plain `DynamicCache` is off behind ``prefix``."""
        if (prefix, suffix) not in self._plain:
            forget_rotary_state(self.model)
            cache = DynamicCache(config=self.model.config)
            ids = torch.tensor([prefix + suffix], device=self.device)
            single = any(spec.has_running_state for spec in layer_specs(self.model.config))
            single = single and not resumes_in_one_call(decoder_config(self.model.config))
            steps = ids[:, len(prefix) :].split(1 if single else len(suffix), dim=1)
            logits = [
                self.model(input_ids=part, use_cache=True, return_dict=True, **cache_argument(cache)).logits
                for part in (ids[:, : len(prefix)], *steps)
                if part.shape[1]
            ]
            found = torch.cat(logits, dim=1)[0, -len(suffix) :].float().cpu()
            apart = differences(self.after(prefix, suffix), found)
            self._plain[prefix, suffix] = typical_difference(apart, judged_dtype(self.model))
        return self._plain[prefix, suffix]


def continued(model: Any, cache: PrefixCache, rows: list[Ids], *, last_only: bool = False) -> torch.Tensor:
    """Feed ``rows`` of equal length behind what ``cache`` holds; return their logits ``[rows, tokens, vocab]``.

    Models whose running state takes one token at a time get one at a time, as everywhere in this package.

    Args:
        model: The model.
        cache: Grows by the tokens.
        rows: The tokens of each row.
        last_only: Compute the logits of the last token only, where the model can leave out the others.
    """
    ids = torch.tensor(rows, device=input_device(model))
    single = bool(cache.seq_length) and takes_single_tokens(model, cache)
    parts = []
    for piece in ids.split(1 if single else ids.shape[1], dim=1):
        extra = _last_only(model, 1) if last_only else {}
        if cache.strategy == "prefix-static" and not runs_on_static_caches(model) and CACHE_ARGUMENT != "cache":
            extra["attention_mask"] = cache.prepare_inputs(piece).attention_mask
        output = model(input_ids=piece, use_cache=True, return_dict=True, **extra, **cache_argument(cache))
        parts.append(output.logits)
    return torch.cat(parts, dim=1)


def _last_only(model: Any, tokens: int) -> dict[str, Any]:
    accepted = inspect.signature(model.forward).parameters
    return {"logits_to_keep": tokens} if "logits_to_keep" in accepted else {}
