"""Score continuations given contexts, each distinct token once, in the order asked."""

import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..compat import original_max_positions
from ..exceptions import CacheCapacityError
from .chunk_size import BatchLimits, default_limits
from .forked import score_forked
from .measured import AttentionChoice
from .model_access import evaluation_mode, input_device, length_limit, prefix_token, uncompiled_model
from .packed import score_packed
from .probes import Probes
from .report import ScoringReport, SelfCheck, remember_report
from .requests import ContinuationScore, TokenRequests, Truncation, check_vocabulary, fit_to_length, pack_requests
from .routes import Route, choose_route
from .rows import score_rows, settle_rotary_state
from .self_check import check_route
from .tree import SortedRows, build_tree, sort_rows

__all__ = ["loglikelihood"]


def loglikelihood(
    model: Any,
    requests: Iterable[Any],
    *,
    max_batch_tokens: int | None = None,
    truncation: Truncation = "error",
    max_length: int | None = None,
    softmax_dtype: torch.dtype = torch.float32,
    progress: bool = True,
    self_check: bool = True,
) -> list[ContinuationScore]:
    """Return the log-probability of each continuation given its context, computing shared prefixes once.

    All requests form one tree of tokens: preamble, few-shot examples, passage, question, choices, as many levels as
    there are. Each token of the tree goes through the model once; duplicates cost nothing. Peak memory is one
    root-to-leaf chain of keys and values and one chunk, whatever the number of requests. Models for which that is not
    exact are scored another way, automatically; `last_scoring_report` says how. The model's mode and settings are as
    before, also after an error.

    An empty continuation scores 0.0 and is greedy. An empty context becomes the beginning-of-text (or else
    end-of-text) token that the model's configuration names, unless the continuation begins with it: then that first
    token is the context and has no score of its own, as in lm-evaluation-harness.

    Args:
        model: A causal language model of Transformers, also inside PEFT's or `torch.compile`'s wrapper.
        requests: Pairs ``(context_ids, continuation_ids)`` of lists, arrays or tensors of token ids. Text pairs are
            encoded by `encode_pairs`.
        max_batch_tokens: Tokens computed at once at most. By default 512 on a CPU (1024 in half precision), 2048 on an
            accelerator, and less where little memory is free.
        truncation: ``"error"``, or ``"left"`` to drop the first tokens of contexts that are too long, as
            lm-evaluation-harness does.
        max_length: Tokens that the model may read at once; by default what its configuration says.
        softmax_dtype: Type in which log-probabilities are taken.
        progress: Whether to show a progress bar that counts tokens.
        self_check: Whether a small sample is compared with plain rows at first use. If they differ, a warning names
            the model and the plain route is taken.

    Returns:
        One `ContinuationScore` for each request, in the order asked.

    Raises:
        RequestError: If a request is malformed; the message names its index.
        InvalidTokensError: If an id is no integer or outside the model's vocabulary; the message names the index.
        CacheCapacityError: If a request is longer than the model can read (the message names the index), or
            ``max_batch_tokens`` is not at least 1.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> few_shot = [3, 1, 4, 1, 5, 9, 2, 6]
        >>> scores = loglikelihood(model, [(few_shot + [7], [8]), (few_shot + [7], [9, 10])], progress=False)
        >>> [len(score.token_logprobs) for score in scores]
        [1, 2]
    """
    begun = time.perf_counter()
    if max_batch_tokens is not None and (not isinstance(max_batch_tokens, int) or max_batch_tokens < 1):
        raise CacheCapacityError(
            f"max_batch_tokens is {max_batch_tokens!r}; it is a number of tokens, at least 1 (None for the default)"
        )
    target = uncompiled_model(model)
    packed_requests = pack_requests(requests, prefix_token_id=prefix_token(target.config))
    check_vocabulary(packed_requests, target.get_input_embeddings().weight.shape[0])
    limit = max_length if max_length is not None else length_limit(target.config)
    packed_requests = fit_to_length(packed_requests, limit, truncation)

    call = _Call(target, packed_requests, max_batch_tokens, softmax_dtype)
    with evaluation_mode(target), tqdm(unit="tok", disable=not progress, desc="Scoring") as bar:
        call.run(bar, self_check)
    remember_report(model, call.report(time.perf_counter() - begun))
    return call.probes.scores()


class _Call:
    """One call of `loglikelihood`, from the checked requests to the filled-in probes."""

    def __init__(
        self, model: Any, requests: TokenRequests, max_batch_tokens: int | None, softmax_dtype: torch.dtype
    ) -> None:
        self.model = model
        self.requests = requests
        self.rows = sort_rows(requests)
        self.probes = Probes.of(requests, self.rows, softmax_dtype)
        self.limits = default_limits(model, max_batch_tokens)
        self.route: Route = choose_route(model)
        self.check = SelfCheck("not needed")
        self.unique_tokens = int((self.rows.lengths - self.rows.shared).sum())
        self.computed_tokens = 0
        self.plain_requests = 0
        self.attention = ""

    def run(self, bar: Any, self_check: bool) -> None:
        """Score everything."""
        if len(self.rows.lengths) == 0:
            return
        settle_rotary_state(self.model, input_device(self.model))
        plain = self._plain_ones()
        if not plain.all():
            checked = self.requests.select(~plain)
            self.check = check_route(self.model, checked, self._score_sample) if self_check else SelfCheck("off")
            if self.check.outcome == "failed":
                self._warn_of_failure()
                self.route = Route("rows", f"the self-check failed: {self.check.reason}")
                plain[:] = True
        self.plain_requests = int(plain.sum())
        self._score_part(~plain, self.route.name, bar)
        self._score_part(plain, "rows", bar)

    def report(self, seconds: float) -> ScoringReport:
        """Return the numbers of this call."""
        return ScoringReport(
            requests=len(self.requests),
            requested_tokens=int(self.requests.fed_lengths.sum()),
            grouped_tokens=int(self.rows.lengths.sum()),
            unique_tokens=self.unique_tokens,
            computed_tokens=self.computed_tokens,
            route=self.route.name,
            route_reason=self.route.reason,
            plain_requests=self.plain_requests,
            self_check=self.check,
            seconds=seconds,
            attention=self.attention,
        )

    def _plain_ones(self) -> np.ndarray:
        """Return which requests have to be plain rows whatever the route, ``[requests]`` bool."""
        if self.route.name == "rows":
            return np.ones(len(self.requests), dtype=bool)
        # Rotary scaling that depends on the length of the whole row is not the same for two rows of one tree.
        limit = original_max_positions(self.model.config)
        return np.zeros(len(self.requests), dtype=bool) if limit is None else self.requests.fed_lengths > limit

    def _score_part(self, chosen: np.ndarray, route: str, bar: Any) -> None:
        if not chosen.any():
            return
        requests, rows, probes = self.requests, self.rows, self.probes
        if not chosen.all():
            requests = requests.select(chosen)
            rows = sort_rows(requests)
            probes = Probes.of(requests, rows, self.probes.softmax_dtype)
        bar.total = (bar.total or 0) + int((rows.lengths if route == "rows" else rows.lengths - rows.shared).sum())

        def count(tokens: int) -> None:
            self.computed_tokens += tokens
            bar.update(tokens)

        self._score(route, requests, rows, probes, self.limits, count)
        if probes is not self.probes:
            self.probes.fill(chosen, probes)

    def _score_sample(self, requests: TokenRequests, rows: SortedRows, probes: Probes, max_tokens: int) -> None:
        limits = BatchLimits(max_tokens, self.limits.max_probes, max_tokens)
        self._score(self.route.name, requests, rows, probes, limits, lambda _: None)

    def _score(
        self,
        route: str,
        requests: TokenRequests,
        rows: SortedRows,
        probes: Probes,
        limits: BatchLimits,
        on_tokens: Callable[[int], object],
    ) -> None:
        if route == "packed":
            tree = build_tree(requests, rows)
            score_packed(
                self.model, tree, probes, limits=limits, on_tokens=on_tokens, on_choice=self._remember_attention
            )
        elif route == "forked":
            score_forked(self.model, build_tree(requests, rows), probes, limits=limits, on_tokens=on_tokens)
        else:
            score_rows(self.model, requests, rows, probes, limits=limits, on_tokens=on_tokens)

    def _remember_attention(self, choice: AttentionChoice) -> None:
        self.attention = str(choice)

    def _warn_of_failure(self) -> None:
        warnings.warn(
            f"{type(self.model).__name__} is scored row by row, without sharing prefixes, because its "
            f"{self.route.name} scores did not match plain ones in the self-check: {self.check.reason}. Please report "
            "this; self_check=False switches the check off",
            stacklevel=4,
        )
