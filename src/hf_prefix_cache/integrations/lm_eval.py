"""lm-evaluation-harness: the model ``hf-prefix``, its own Hugging Face model with every shared prefix computed once.

Importing this module registers the name::

    import lm_eval
    import hf_prefix_cache.integrations.lm_eval

    lm_eval.simple_evaluate(model="hf-prefix", model_args="pretrained=...", tasks=["mmlu_anatomy"])
"""

import logging
import warnings
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from ..exceptions import MissingPackageError, UnsupportedLayerError, UnsupportedModelError
from ..generation.support import check_model
from ..report import last_report
from ..scoring import encode_pairs, last_scoring_report, loglikelihood, loglikelihood_rolling
from ..scoring.model_access import innermost_model, uncompiled_model, uses_virtual_tokens
from .lm_eval_counts import PromptCounts, common_start, scoring_counts
from .lm_eval_report import PrefixReport, TaskReport, last_prefix_report, remember_prefix_report

try:
    from lm_eval.api.registry import register_model
    from lm_eval.models.huggingface import HFLM
except ModuleNotFoundError as error:
    if (error.name or "").split(".")[0] != "lm_eval":
        raise
    raise MissingPackageError(
        "the model hf-prefix needs lm-evaluation-harness, which is not installed; run "
        'pip install "hf-prefix-cache[lm-eval]"'
    ) from error

__all__ = ["MODEL_NAME", "PrefixHFLM", "PrefixReport", "TaskReport", "last_prefix_report"]

MODEL_NAME = "hf-prefix"
_STRATEGY = "prefix-dynamic"
_UNNAMED = "(no task)"
_MIXED = "generative tasks"

_log = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")


@register_model(MODEL_NAME)
class PrefixHFLM(HFLM):
    """The harness' `HFLM`, which computes every prefix that requests share once.

    All arguments of `HFLM` keep their meaning. ``batch_size`` counts rows, so it is about generation only:
    log-likelihoods are computed in chunks of tokens, whose number follows from the free memory. Each task's requests
    form one token tree. Encoder-decoder models, models split by ``tp_plan`` and backends that are not Transformers'
    go through `HFLM`'s own code, which a warning says once.

    Under ``accelerate launch`` each process scores what the harness deals out to it. Nothing here waits for another
    process. `HFLM` deals out over several GPUs only; here processes on CPUs share the work too.

    Args:
        *args: Arguments of `HFLM`.
        max_batch_tokens: Tokens computed at once at most, for log-likelihoods; by default what the free memory allows.
        self_check: Whether a small sample is compared with plain rows at first use.
        **kwargs: Arguments of `HFLM`; ``softmax_dtype`` is float32 unless given.

    Example:
        >>> from lm_eval.api.instance import Instance
        >>> from tokenizers import Tokenizer, models, pre_tokenizers
        >>> from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        >>> words = Tokenizer(models.WordLevel({"one": 0, "two": 1, "three": 2, "[END]": 3}, unk_token="one"))
        >>> words.pre_tokenizer = pre_tokenizers.Whitespace()
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]", pad_token="[END]")
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> lm = PrefixHFLM(LlamaForCausalLM(LlamaConfig(vocab_size=4, **sizes)), tokenizer=tokenizer)
        >>> pairs = [("one two three", " two one"), ("one two three", " three one")]
        >>> requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
        >>> [is_greedy in (True, False) for logprob, is_greedy in lm.loglikelihood(requests, disable_tqdm=True)]
        [True, True]
        >>> total = lm.prefix_report().total
        >>> total.requested_tokens, total.computed_tokens
        (8, 5)
    """

    def __init__(
        self, *args: Any, max_batch_tokens: int | None = None, self_check: bool = True, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.max_batch_tokens = max_batch_tokens
        self.self_check = self_check
        self._task = _UNNAMED
        self._reports: dict[tuple[str, str], TaskReport] = {}
        self._prompts: PromptCounts | None = None
        accelerator = getattr(self, "accelerator", None)
        if accelerator is not None and self.world_size == 1:
            # HFLM deals documents out over several GPUs only; otherwise every process would do all of the work.
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        self._own_code = self._why_own_code()
        if self._own_code:
            warnings.warn(
                f"{MODEL_NAME} runs HFLM's own code, without sharing prefixes, because {self._own_code}", stacklevel=2
            )

    def prefix_report(self) -> PrefixReport:
        """Return what each task's last run asked for, computed and reused, on this process."""
        return PrefixReport(tuple(self._reports.values()), self.rank, self.world_size, self._own_code)

    def get_model_info(self) -> dict[str, Any]:
        """Add the report to what the harness writes to its results."""
        return {**super().get_model_info(), "prefix_report": self.prefix_report().as_dict()}

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations; a pair whose texts merge into one token is split where `encode_pairs` says."""
        if self._own_code or getattr(self, "enable_thinking", None):  # HFLM refuses to score while thinking
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return self._by_task(requests, partial(self._score_texts, disable_tqdm=disable_tqdm))

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, in the harness' windows."""
        if self._own_code:
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        return self._by_task(requests, partial(self._score_rolling, disable_tqdm=disable_tqdm))

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts; what they have in common is computed once where the model's caches allow it."""
        own_generate = super().generate_until

        def run(requests: list[Any]) -> list[str]:
            self._prompts = PromptCounts()
            try:
                answers = own_generate(requests, disable_tqdm=disable_tqdm)
                if self._prompts.rows:
                    self._record(self._prompts.counts(self._task, len(requests)))
            finally:
                self._prompts = None
            return answers

        # HFLM searches the batch size anew in each call.
        return self._by_task(requests, run, split=self.batch_size != "auto")

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        if self._own_code:
            return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)
        pairs = [(context, continuation) for _, context, continuation in requests]
        too_long = sum(len(context) + len(continuation) > self.max_length + 1 for context, continuation in pairs)
        if too_long:
            _log.warning(
                "%d of %d requests are longer than the model's %d tokens; their contexts are cut from the left",
                too_long,
                len(pairs),
                self.max_length,
            )
        with self._precision():
            scores = loglikelihood(self.model, pairs, truncation="left", **self._options(disable_tqdm))
        answers = [(score.logprob, score.is_greedy) for score in scores]
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        self._record_scoring("loglikelihood", len(requests), root_tokens=common_start(pairs))
        return answers

    def _score_texts(self, requests: list[Any], *, disable_tqdm: bool) -> list[tuple[float, bool]]:
        texts = [request.args for request in requests]
        pairs = encode_pairs(
            self.tokenizer, texts, prefix_token_id=self.prefix_token_id, add_bos_token=self.add_bos_token
        )
        encoded = [(text, *pair) for text, pair in zip(texts, pairs, strict=True)]
        return self._loglikelihood_tokens(encoded, disable_tqdm=disable_tqdm)

    def _score_rolling(self, requests: list[Any], *, disable_tqdm: bool) -> list[float]:
        texts = [request.args[0] for request in requests]
        tokens = [self.tok_encode(text) for text in texts]
        with self._precision():
            scores = loglikelihood_rolling(
                self.model, tokens, prefix_token_id=self.prefix_token_id, **self._options(disable_tqdm)
            )
        for text, score in zip(texts, scores, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), score.logprob)
        self._record_scoring("loglikelihood_rolling", len(requests))
        return [score.logprob for score in scores]

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        mask = generation_kwargs.get("attention_mask")
        if not self._generates_with_prefixes or "cache_implementation" in generation_kwargs:
            return super()._model_generate(context, max_length, stop, **generation_kwargs)
        generation_kwargs["cache_implementation"] = _STRATEGY
        if self.mixed_precision_dtype is not None:
            # What is computed under autocast never goes into calls without it.
            generation_kwargs["cache_config"] = {"namespace": f"autocast to {self.mixed_precision_dtype}"}
        output = super()._model_generate(context, max_length, stop, **generation_kwargs)
        report = last_report(self._transformers_model)
        if self._prompts is not None and report is not None:
            self._prompts.add(context, mask, report)
        return output

    @property
    def _transformers_model(self) -> Any:
        return innermost_model(uncompiled_model(self.model))

    @cached_property
    def _generates_with_prefixes(self) -> bool:
        if self._own_code:
            return False
        try:
            if uses_virtual_tokens(self.model):
                raise UnsupportedModelError("PEFT puts learned tokens before every input")
            check_model(self._transformers_model, _STRATEGY)
        except (UnsupportedLayerError, UnsupportedModelError) as error:
            warnings.warn(f"{MODEL_NAME} generates without reusing prefixes: {error}", stacklevel=2)
            return False
        return True

    def _why_own_code(self) -> str:
        model = self._transformers_model
        if self.backend != "causal":
            return f"{type(model).__name__} has an encoder"
        if not isinstance(model, PreTrainedModel):
            return f"{type(model).__name__} is not a model class of Transformers"
        if (model.tp_size or 1) > 1:
            # Every process would have to cut its chunks alike, or they would wait for each other for ever.
            return "tensor parallelism computes each forward on several processes at once"
        return ""

    def _precision(self) -> torch.autocast:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not None)

    def _options(self, disable_tqdm: bool) -> dict[str, Any]:
        return {
            "max_batch_tokens": self.max_batch_tokens,
            "max_length": self.max_length,
            "softmax_dtype": self.softmax_dtype or torch.float32,
            "progress": not disable_tqdm and self.rank == 0,
            "self_check": self.self_check,
        }

    def _by_task(
        self, requests: list[Any], run: Callable[[list[Any]], list[_Answer]], *, split: bool = True
    ) -> list[_Answer]:
        """Answer each task's requests by themselves, so that its numbers are its own; keep the order."""
        places: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            places.setdefault(request.task_name or _UNNAMED, []).append(place)
        if not split and len(places) > 1:
            places = {_MIXED: list(range(len(requests)))}
        answers: dict[int, _Answer] = {}
        try:
            for self._task, here in places.items():
                answers.update(zip(here, run([requests[place] for place in here]), strict=True))
        finally:
            self._task = _UNNAMED
        return [answers[place] for place in range(len(requests))]

    def _record_scoring(self, kind: str, requests: int, *, root_tokens: int = 0) -> None:
        report = last_scoring_report(self.model)
        if report is not None:
            self._record(scoring_counts(self._task, kind, requests, report, root_tokens=root_tokens))

    def _record(self, report: TaskReport) -> None:
        self._reports[report.task, report.kind] = report
        remember_prefix_report(self.prefix_report())
