"""The demo's prompts and measurements."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from typing import Any, cast

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..caches import PrefixCache, total_nbytes
from ..compat import cache_argument, decoder_config
from ..exceptions import CacheCapacityError
from ..model import PrefixCachedModel
from ..packaged_model import load_model
from ..report import GenerationReport
from ..snapshot import PrefixSnapshot
from ..store import store_for
from ._console import CommandError
from .demo_results import Answer, Branch, DemoResult, ForkResult, Loss, StrategyResult

__all__ = ["load", "run_demo", "step_count"]

_TEXT = json.loads(resources.files(__package__).joinpath("demo_text.json").read_text(encoding="utf-8"))
_INSTRUCTION: str = "\n\n".join(_TEXT["instruction"])
_QUESTIONS: list[str] = _TEXT["questions"]
_BRANCHES: list[str] = _TEXT["branches"]
_AFTERWARDS: str = _TEXT["afterwards"]
_ALL = (*_QUESTIONS, *_BRANCHES, _AFTERWARDS)


def load(name_or_path: str | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer, without progress bars and advice of other packages.

    Raises:
        MissingPackageError: The packaged model was asked for and is not installed.
        CommandError: Transformers cannot load a model of that name.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it advises to install faster kernels
    if name_or_path is None:
        return load_model()
    try:
        return load_model(name_or_path)
    except Exception as error:  # Transformers raises errors of many kinds for names and folders that are not models
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise CommandError(f"the model {name_or_path!r} could not be loaded: {reason[0]}") from error


def step_count(strategies: Sequence[str]) -> int:
    """Return how often `run_demo` calls ``step``."""
    return (1 + len(_ALL)) * (1 + len(strategies))


def run_demo(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    name: str,
    strategies: Sequence[str],
    new_tokens: int,
    step: Callable[[str], None],
) -> DemoResult:
    """Ask every question without reuse, and with reuse by each of ``strategies``.

    Args:
        model: The model.
        tokenizer: Its tokenizer; if that has a chat template, questions are asked in it.
        name: The model's name, for the result.
        strategies: Names of strategies.
        new_tokens: Tokens of each answer at most.
        step: Called before each step with what it does.

    Raises:
        CacheCapacityError: The model does not take prompts as long as the demo's.
    """
    demo = _Demo(model, tokenizer, new_tokens=new_tokens, step=step)
    demo.ask_plainly()
    results = tuple(demo.ask_with_reuse(strategy) for strategy in strategies)
    return DemoResult(
        model=name,
        device=str(model.device),
        dtype=str(model.dtype).removeprefix("torch."),
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        transformers=transformers.__version__,
        new_tokens=new_tokens,
        strategies=results,
        equal=all(result.equal for result in results if result.loss is None),
    )


class _Demo:
    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        new_tokens: int,
        step: Callable[[str], None],
    ) -> None:
        self.model, self.tokenizer, self.step = model, tokenizer, step
        self.options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        self.prompts = {question: self._encode(question) for question in _ALL}
        self.prefix_ids = _common_prefix(list(self.prompts.values()))
        self.room = max(ids.shape[1] for ids in self.prompts.values()) + new_tokens
        limit = getattr(decoder_config(model.config), "max_position_embeddings", None)
        if limit is not None and self.room > limit:
            raise CacheCapacityError(
                f"the demo's prompts with their answers take up to {self.room} tokens, but {type(model).__name__} "
                f"takes {limit} (max_position_embeddings); name a model that takes more"
            )
        self.plain: dict[str, tuple[torch.Tensor, float]] = {}

    def ask_plainly(self) -> None:
        """Ask every question without reuse."""
        self.step("Warming up")
        self._generate(self.prefix_ids[:, :16])
        for question, ids in self.prompts.items():
            self.step(f"Without reuse: {question}")
            self.plain[question] = _timed(partial(self._generate, ids))

    def ask_with_reuse(self, strategy: str) -> StrategyResult:
        """Compute the prefix, then ask every question with it, by ``strategy``."""
        store_for(self.model).clear()
        cached = PrefixCachedModel(self.model, self.tokenizer, strategy=strategy)
        self.step(f"{strategy}: computing the prefix")
        prefix, prefix_seconds = _timed(partial(cached.prefill, self.prefix_ids))
        answers = []
        for question in _QUESTIONS:
            self.step(f"{strategy}: {question}")
            ids = self.prompts[question]
            output, seconds = _timed(partial(cached.generate, ids, prefix=prefix, **self.options))
            answers.append(self._answer(question, output, seconds, cached))
        options = {"max_cache_len": self.room} if strategy == "prefix-static" else {}
        cache = prefix.to_cache(strategy, **options)
        cache_bytes = cache.nbytes
        fork = self._fork(cache, prefix)
        plain = sum(answer.seconds_plain for answer in answers)
        reused = prefix_seconds + sum(answer.seconds_reused for answer in answers)
        texts: tuple[Answer | Branch, ...] = (*answers, *fork.branches, fork.afterwards)
        return StrategyResult(
            strategy=strategy,
            prefix_tokens=prefix.seq_length,
            prefix_seconds=prefix_seconds,
            prefix_bytes=prefix.nbytes,
            cache_bytes=cache_bytes,
            answers=tuple(answers),
            seconds_plain=plain,
            seconds_reused=reused,
            speed_up=plain / reused,
            fork=fork,
            equal=all(text.equal for text in texts),
            loss=_loss(prefix, texts),
        )

    def _fork(self, cache: PrefixCache, prefix: PrefixSnapshot) -> ForkResult:
        forks = [cache.fork() for _ in _BRANCHES]
        shared, copied = total_nbytes([cache, *forks]), (1 + len(forks)) * cache.nbytes
        branches = tuple(self._branch(*pair, cache.strategy) for pair in zip(_BRANCHES, forks, strict=True))
        first = forks[0]
        went_back_by = "crop_to" if first.can_crop_to(prefix.seq_length) else "restore"
        if went_back_by == "crop_to":
            first.crop_to(prefix.seq_length)
        else:
            first.restore(prefix)
        return ForkResult(
            branches=branches,
            went_back_by=went_back_by,
            afterwards=self._branch(_AFTERWARDS, first, cache.strategy),
            shared_bytes=shared,
            copied_bytes=copied,
        )

    def _branch(self, question: str, fork: PrefixCache, strategy: str) -> Branch:
        self.step(f"{strategy}, a fork: {question}")
        output = self._generate(self.prompts[question], **cache_argument(fork))
        expected = self.plain[question][0]
        return Branch(
            question,
            self._text(question, output),
            equal=torch.equal(output, expected),
            equal_share=self._equal_share(question, output),
        )

    def _answer(self, question: str, output: torch.Tensor, seconds: float, cached: PrefixCachedModel) -> Answer:
        report = cast(GenerationReport, cached.report())
        expected, seconds_plain = self.plain[question]
        return Answer(
            question=question,
            text=self._text(question, output),
            prompt_tokens=report.prompt_tokens,
            computed_tokens=report.computed_tokens,
            reused_tokens=report.reused_tokens,
            seconds_plain=seconds_plain,
            seconds_reused=seconds,
            equal=torch.equal(output, expected),
            equal_share=self._equal_share(question, output),
        )

    def _equal_share(self, question: str, output: torch.Tensor) -> float:
        """Return the share of places behind the prompt at which ``output`` has the token of uncached generation."""
        start = self.prompts[question].shape[1]
        ours, theirs = output[0, start:].tolist(), self.plain[question][0][0, start:].tolist()
        same = sum(one == other for one, other in zip(ours, theirs, strict=False))
        return same / max(len(ours), len(theirs))

    def _generate(self, ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        generate: Any = self.model.generate
        output: torch.Tensor = generate(ids, attention_mask=torch.ones_like(ids), **self.options, **kwargs)
        return output

    def _encode(self, question: str) -> torch.Tensor:
        if self.tokenizer.chat_template is None:
            ids = self.tokenizer(f"{_INSTRUCTION}\n\nQuestion: {question}\nAnswer:", return_tensors="pt")
        else:
            # In the user's turn, since some templates take no system message.
            messages = [{"role": "user", "content": f"{_INSTRUCTION}\n\nQuestion: {question}"}]
            ids = self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        return ids["input_ids"].to(self.model.device)

    def _text(self, question: str, output: torch.Tensor) -> str:
        answer = output[0, self.prompts[question].shape[1] :]
        text = cast(str, self.tokenizer.decode(answer, skip_special_tokens=True))
        return " ".join(text.split())


def _loss(prefix: PrefixSnapshot, texts: Sequence[Answer | Branch]) -> Loss | None:
    error = prefix.error
    if error is None:
        return None
    share = sum(text.equal_share for text in texts) / len(texts)
    return Loss(keys=max(error.keys), values=max(error.values), equal_share=share)


def _common_prefix(prompts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tokens ``[1, tokens]`` that all ``prompts`` begin with."""
    length = min(ids.shape[1] for ids in prompts)
    while any(not torch.equal(ids[:, :length], prompts[0][:, :length]) for ids in prompts):
        length -= 1
    return prompts[0][:, :length]


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start
