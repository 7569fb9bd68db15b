"""What is right: the uncached model, row by row. And what plain Transformers makes of a cached prefix.

`check`, the scorer's self-check and the trial of ``prefix-auto`` judge by it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from itertools import product
from typing import Any

import torch
from transformers import DynamicCache

from .architectures import resumes_in_one_call, runs_on_static_caches
from .caches import PrefixCache
from .compat import CACHE_ARGUMENT, cache_argument, decoder_config, forget_rotary_state, layer_specs
from .forward import takes_single_tokens
from .tolerance import TOLERANCES, differences, is_judged_by_mean, judged_dtype, typical_difference
from .weights import input_device

__all__ = ["Ids", "Oracle", "continued"]

Ids = tuple[int, ...]
_ROUNDING = 3e-5  # of the largest logit: what plain Transformers may be off by to count as rounding
_LEAST_ROUNDING = 1e-3
_BATCH = 3  # rows of the batch in which plain Transformers is run as well


class Oracle:
    """Uncached logits of rows, remembered, and the judgement on others."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.device = input_device(model)
        self._known: dict[tuple[Ids, int], torch.Tensor] = {}
        self._plain: dict[tuple[Ids, Ids], tuple[float, ...]] = {}

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
            # In half precision there is no telling rounding from more.
            most = torch.inf if is_judged_by_mean(dtype) else max(_LEAST_ROUNDING, _ROUNDING * largest)
            plain = [found for prefix, suffix in rows for found in self._plain_deviations(prefix, suffix)]
            tolerance = max(tolerance, 2 * max((found for found in plain if found <= most), default=0.0))
        return deviation, tolerance

    def _plain_deviations(self, prefix: Ids, suffix: Ids) -> tuple[float, ...]:
        """Return how far plain `DynamicCache` is off behind ``prefix``, in each of the ways to run it.

        Ill-conditioned models make a hundred times more of the rounding in one way than in another, and which way
        that is depends on the processor. In half precision, where the mean counts, the usual way is enough.
        """
        if (prefix, suffix) not in self._plain:
            single = any(spec.has_running_state for spec in layer_specs(self.model.config))
            single = single and not resumes_in_one_call(decoder_config(self.model.config))
            usual, dtype = 1 if single else len(suffix), judged_dtype(self.model)
            batches, steps = ((1,), {usual}) if is_judged_by_mean(dtype) else ((1, _BATCH), {1, usual})
            right = self.after(prefix, suffix)
            self._plain[prefix, suffix] = tuple(
                typical_difference(differences(right.expand_as(found), found), dtype)
                for found in (self._plain_logits(prefix, suffix, *way) for way in product(batches, steps))
            )
        return self._plain[prefix, suffix]

    def _plain_logits(self, prefix: Ids, suffix: Ids, rows: int, step: int) -> torch.Tensor:
        """Return what plain `DynamicCache` gives at ``suffix``, ``step`` tokens a call, ``[rows, suffix, vocab]``."""
        forget_rotary_state(self.model)
        options = {"use_cache": True, "return_dict": True, **cache_argument(DynamicCache(config=self.model.config))}
        ids = torch.tensor([prefix + suffix] * rows, device=self.device)
        if prefix:
            self.model(input_ids=ids[:, : len(prefix)], **options, **_last_only(self.model, 1))
        steps = ids[:, len(prefix) :].split(step, dim=1)
        return torch.cat([self.model(input_ids=part, **options).logits.float().cpu() for part in steps], dim=1)


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
