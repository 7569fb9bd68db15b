"""Evaluation while `transformers.Trainer` trains, with the weights of the moment and each prefix once."""

import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..exceptions import RequestError
from ..scoring import ContinuationScore, ScoringReport, last_scoring_report, loglikelihood
from ..scoring.model_access import input_device
from .evaluation_loss import EvaluationLoss, check_loss, mean_loss, prefix_evaluation_loss
from .labelled_rows import LabelledRow, labelled_rows

__all__ = ["EvaluationLoss", "PrefixEvalCallback", "Question", "prefix_evaluation_loss"]


class Question(NamedTuple):
    """A multiple-choice question.

    Attributes:
        choices: Indices of the requests whose continuations are its choices.
        answer: Which of the choices is right: a place in ``choices``.
    """

    choices: Sequence[int]
    answer: int


class PrefixEvalCallback(TrainerCallback):
    """Score requests, a labelled data set or both whenever `transformers.Trainer` evaluates.

    All of it goes through the model once per evaluation and each shared prefix once, with the weights of the moment:
    no keys or values outlive an evaluation. During training several evaluations of one step (one for each of
    ``Trainer``'s data sets) take the same numbers. The results join the metrics that ``Trainer.evaluate`` returns, so
    ``metric_for_best_model`` may name them, and the trainer's log:

    - ``eval_prefix_loss``: the data set's ``eval_loss``, by the trainer's ``per_device_eval_batch_size``, in the
      mixed precision that it trains in, without label smoothing; see `prefix_evaluation_loss`;
    - ``eval_prefix_logprob``: the mean log-probability of the requests' continuations;
    - ``eval_prefix_accuracy``: the share of ``questions`` whose right choice is the most probable one;
    - ``eval_prefix_computed_tokens``, ``eval_prefix_reused_tokens`` and ``eval_prefix_runtime``, in seconds.

    ``scores`` holds one `ContinuationScore` for each request, of the last evaluation.

    With several processes each scores everything, as sharded models need it.

    Args:
        requests: Pairs ``(context_ids, continuation_ids)``, as for `hpc.loglikelihood`.
        dataset: A labelled data set, as for `prefix_evaluation_loss`. It is read once.
        questions: Multiple-choice questions over ``requests``.
        data_collator: What makes batches of ``dataset``, if it is not to be taken as it is.
        max_batch_tokens: Tokens computed at once at most; by default chosen by the free memory.
        self_check: Whether a small sample is compared with plain rows at every evaluation, as in `hpc.loglikelihood`.
        prefix: How the metrics' names begin; two callbacks need two.
        trainer: The trainer, which then logs the results to all it reports to. Without it, as in
            ``Trainer(callbacks=[...])``, they are in its ``state.log_history`` only.

    Raises:
        RequestError: If there is nothing to score, or a question names a choice that does not exist.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
        >>> sizes = dict(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> few_shot = [3, 1, 4, 1, 5, 9]
        >>> callback = PrefixEvalCallback(
        ...     [(few_shot + [7], [8]), (few_shot + [7], [9])], questions=[Question(choices=(0, 1), answer=0)]
        ... )
        >>> arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, report_to="none")
        >>> rows = [{"input_ids": few_shot, "labels": few_shot}]
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> Trainer(model, arguments, eval_dataset=rows, callbacks=[callback]).evaluate()
        {'eval_loss': ... 'eval_prefix_accuracy': ...}
    """

    def __init__(
        self,
        requests: Sequence[Any] | None = None,
        dataset: Any = None,
        *,
        questions: Sequence[Question] = (),
        data_collator: Callable[[list[Any]], Any] | None = None,
        max_batch_tokens: int | None = None,
        self_check: bool = True,
        prefix: str = "eval_prefix",
        trainer: Trainer | None = None,
    ) -> None:
        if not requests and dataset is None:
            raise RequestError("there is nothing to score: pass requests, a labelled dataset, or both")
        self._requests = list(requests or ())
        self._questions = [Question(tuple(choices), answer) for choices, answer in questions]
        for index, question in enumerate(self._questions):
            known = all(0 <= choice < len(self._requests) for choice in question.choices)
            if not known or not 0 <= question.answer < len(question.choices):
                raise RequestError(
                    f"question {index} is {tuple(question)}; its choices are indices of the {len(self._requests)} "
                    "requests, and its answer is a place among its choices"
                )
        self._dataset = dataset
        self._data_collator = data_collator
        self._max_batch_tokens = max_batch_tokens
        self._self_check = self_check
        self._prefix = prefix
        self._trainer = weakref.ref(trainer) if trainer is not None else lambda: None
        self._rows: list[LabelledRow] | None = None
        self._training = False
        self._step = -1
        self._found: dict[str, float] = {}
        self.scores: list[ContinuationScore] = []

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Read the data set, so that what is wrong with it shows before any training."""
        self._training, self._step = True, -1
        self._read(args, kwargs["model"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Take numbers of this training for no later evaluation."""
        self._training, self._step = False, -1

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Score everything, add the results to the trainer's ``metrics`` and log them."""
        # A training step ends in another number, so within one the weights stay.
        if not self._training or self._step != state.global_step:
            self._read(args, kwargs["model"])
            with _precision(args, kwargs["model"]):
                self._found = self._score(args, kwargs["model"])
            self._step = state.global_step
        kwargs["metrics"].update(self._found)
        trainer = self._trainer()
        if trainer is not None:
            trainer.log(dict(self._found))
        else:
            state.log_history.append({**self._found, "epoch": state.epoch, "step": state.global_step})

    def _read(self, args: TrainingArguments, model: Any) -> None:
        if self._rows is None and self._dataset is not None:
            check_loss(model)
            self._rows = labelled_rows(
                model, self._dataset, data_collator=self._data_collator, batch_size=args.eval_batch_size
            )

    def _score(self, args: TrainingArguments, model: Any) -> dict[str, float]:
        begun = time.perf_counter()
        rows = self._rows or []
        found = loglikelihood(
            model,
            [*self._requests, *((row.context, row.continuation) for row in rows)],
            max_batch_tokens=self._max_batch_tokens,
            self_check=self._self_check,
            progress=False,
        )
        report = cast(ScoringReport, last_scoring_report(model))
        self.scores = found[: len(self._requests)]
        results: dict[str, float] = {}
        if rows:
            of_rows = found[len(self._requests) :]
            results["loss"] = mean_loss(model, rows, of_rows, batch_size=args.eval_batch_size)
        if self.scores:
            results["logprob"] = float(np.mean([score.logprob for score in self.scores]))
        if self._questions:
            results["accuracy"] = float(np.mean([self._is_right(question) for question in self._questions]))
        results |= {"computed_tokens": report.computed_tokens, "reused_tokens": report.reused_tokens}
        results["runtime"] = time.perf_counter() - begun
        return {f"{self._prefix}_{name}": value for name, value in results.items()}

    def _is_right(self, question: Question) -> bool:
        best = np.argmax([self.scores[choice].logprob for choice in question.choices])
        return int(best) == question.answer


def _precision(args: TrainingArguments, model: Any) -> AbstractContextManager[Any]:
    """Return the autocast that the trainer evaluates in, so that the self-check knows how much rounding to expect."""
    if not (args.bf16 or args.fp16):
        return nullcontext()
    return torch.autocast(input_device(model).type, torch.bfloat16 if args.bf16 else torch.float16)
