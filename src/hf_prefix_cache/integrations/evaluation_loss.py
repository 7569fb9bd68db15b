"""The evaluation loss of `transformers.Trainer`, with shared prefixes computed once."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ..exceptions import UnsupportedModelError
from ..scoring import ContinuationScore, ScoringReport, last_scoring_report, loglikelihood
from ..scoring.model_access import innermost_model, uncompiled_model
from .labelled_rows import LabelledRow, labelled_rows

__all__ = ["EvaluationLoss", "check_loss", "mean_loss", "prefix_evaluation_loss"]


@dataclass(frozen=True)
class EvaluationLoss:
    """The loss of a data set and what it took.

    Attributes:
        loss: What ``Trainer.evaluate()`` calls ``eval_loss``; NaN if no row has a label.
        tokens: Tokens that the loss is taken over.
        rows: Rows of the data set.
        report: Tokens asked for, computed and reused.
    """

    loss: float
    tokens: int
    rows: int
    report: ScoringReport


def prefix_evaluation_loss(
    model: Any,
    dataset: Any,
    *,
    data_collator: Callable[[list[Any]], Any] | None = None,
    per_device_eval_batch_size: int = 8,
    max_batch_tokens: int | None = None,
    self_check: bool = True,
    progress: bool = False,
) -> EvaluationLoss:
    """Return the ``eval_loss`` of a labelled data set, computing what rows have in common at their start once.

    Rows may share prefixes or not, in any order: they are put in prefix order. The loss is that of `Trainer.evaluate`
    for the same data set, collator and batch size, in one process and without label smoothing: the mean over each
    batch's tokens, then the mean over batches, weighted by their rows; batches without a finite loss are left out
    (before Transformers 5.23 `Trainer` gives NaN there). So the batch size matters for the result, though not for how
    the tokens are computed.

    Nothing is kept between calls: the weights are those of now, the adapter is the active one (or none, inside
    ``model.disable_adapter()``), every module's mode is put back as it was, and all memory is free again. Models that
    were trained in mixed precision are evaluated in it inside the same ``torch.autocast`` only.

    Args:
        model: A causal language model of Transformers, also with PEFT's adapters.
        dataset: A data set for `Trainer`: rows with ``input_ids`` and ``labels``, which are the token's own id or -100
            where it does not count, and with an ``attention_mask`` if they are padded. Columns that the model's
            forward does not take are left out.
        data_collator: What `Trainer` would collate batches with, if it makes labels or changes tokens.
        per_device_eval_batch_size: As in `TrainingArguments`.
        max_batch_tokens: Tokens computed at once at most; by default chosen by the free memory.
        self_check: Whether a small sample is compared with plain rows first, as in `loglikelihood`.
        progress: Whether to show a progress bar that counts tokens.

    Returns:
        The loss with its numbers.

    Raises:
        InputMismatchError: If a row cannot be scored as `Trainer` would (another token's id as a label, several
            sequences in one row, inputs beside token ids); the message names its index.
        CacheCapacityError: If a row is longer than the model's limit; the message names its index.
        InvalidTokensError: If a token id is outside the model's vocabulary; the message names the row's index.
        UnsupportedModelError: If the model's own loss is another one than the cross entropy of its tokens.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(
        ...     vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
        ... )
        >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
        >>> instruction = [3, 1, 4, 1, 5, 9]
        >>> rows = [{"input_ids": instruction + [n, 7], "labels": [-100] * 7 + [7]} for n in range(8)]
        >>> result = prefix_evaluation_loss(model, rows)
        >>> result.tokens, result.report.requested_tokens, result.report.computed_tokens
        (8, 56, 14)
    """
    check_loss(model)
    rows = labelled_rows(model, dataset, data_collator=data_collator, batch_size=per_device_eval_batch_size)
    scores = loglikelihood(
        model,
        [(row.context, row.continuation) for row in rows],
        max_batch_tokens=max_batch_tokens,
        self_check=self_check,
        progress=progress,
    )
    return EvaluationLoss(
        loss=mean_loss(model, rows, scores, batch_size=per_device_eval_batch_size),
        tokens=sum(int(row.is_labelled.sum()) for row in rows),
        rows=len(rows),
        report=cast(ScoringReport, last_scoring_report(model)),
    )


def mean_loss(
    model: Any, rows: Sequence[LabelledRow], scores: Sequence[ContinuationScore], *, batch_size: int
) -> float:
    """Average as `Trainer` does.

    Args:
        model: The model, which decides what `Trainer` divides by.
        rows: The rows of a data set, in its order.
        scores: One score for each of them.
        batch_size: Rows of a batch.
    """
    counts_first = _counts_first_labels(innermost_model(uncompiled_model(model)))
    totals = [
        -float(np.asarray(score.token_logprobs)[row.is_labelled].sum())
        for row, score in zip(rows, scores, strict=True)
    ]
    counts = [int(row.is_labelled.sum()) + int(counts_first and row.first_is_labelled) for row in rows]
    losses, weights = [], []
    for start in range(0, len(rows), batch_size):
        batch = slice(start, start + batch_size)
        count = sum(counts[batch])
        losses.append(sum(totals[batch]) / count if count else math.nan)
        weights.append(len(counts[batch]))
    finite = np.isfinite(losses)
    kept = finite if finite.any() else ~finite
    return float(np.average(np.asarray(losses)[kept], weights=np.asarray(weights)[kept]))


def check_loss(model: Any) -> None:
    """Raise `UnsupportedModelError` if the model's own loss is another one than the cross entropy of its tokens."""
    base = innermost_model(uncompiled_model(model))
    # A loss that was set goes before the one that the class name stands for; most names stand for the usual one.
    loss = vars(base).get("_loss_function", LOSS_MAPPING.get(str(_loss_type(base)), ForCausalLMLoss))
    if loss is not ForCausalLMLoss:
        raise UnsupportedModelError(
            f"{type(base).__name__} computes a loss of its own ({getattr(loss, '__name__', loss)}), not the cross "
            "entropy of its tokens; use Trainer.evaluate"
        )
    if getattr(base.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(
            f"{type(base).__name__} has an encoder, so its labels are not its input ids; use Trainer.evaluate"
        )
    if getattr(base.config, "output_router_logits", False):
        raise UnsupportedModelError(
            f"{type(base).__name__} adds its router's auxiliary loss (output_router_logits is True), which depends on "
            "every token of a batch; set model.config.output_router_logits = False, or use Trainer.evaluate"
        )


def _counts_first_labels(base: Any) -> bool:
    """Return whether `Trainer` counts labels of first tokens, which have no loss, among those it divides by.

    It does for models that take the count from it but whose class name says nothing of their loss, such as GPT-2.
    """
    parameters = inspect.signature(base.forward).parameters.values()
    takes_count = getattr(
        base, "accepts_loss_kwargs", any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    )
    return bool(takes_count) and LOSS_MAPPING.get(str(_loss_type(base))) is not ForCausalLMLoss


def _loss_type(base: Any) -> str | None:
    return getattr(base, "loss_type", None)
