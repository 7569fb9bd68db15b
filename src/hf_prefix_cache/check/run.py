"""`check`: every strategy × operation on the user's own model."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import transformers

from ..compat import decoder_config
from ..exceptions import PrefixCacheError
from ..oracle import Oracle
from ..scoring.model_access import evaluation_mode, input_device
from ..validation import STRATEGIES, check_strategy
from .case import Case, Findings
from .operations import OPERATIONS
from .report import CheckCell, CheckReport
from .scoring import check_scoring
from .texts import Texts, plan_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["check"]

_CHECKED = tuple(strategy for strategy in STRATEGIES if strategy != "prefix-auto")  # which is one of the others


def check(
    model: PreTrainedModel,
    *,
    strategies: Sequence[str] = _CHECKED,
    operations: Sequence[str] = tuple(OPERATIONS),
    scoring: bool = True,
    input_ids: Sequence[int] | None = None,
    max_tokens: int = 256,
    thorough: bool = True,
    on_step: Callable[[str], object] = lambda step: None,
) -> CheckReport:
    """Compare what each strategy and operation gives on this model and device with the uncached model, row by row.

    A prefix is cut before, at and beyond each length at which the model works differently (windows, convolutions,
    sparse attention, rotary scaling), and continued by 1, 2 and 7 tokens. In float32 logits must agree within 1e-4,
    or within twice what plain Transformers deviates by where that is rounding. A quantized prefix is compared with
    what it stands for. What is not done exactly must be refused by a typed error.

    The model's mode, settings and store are as before afterwards.

    Args:
        model: A causal language model of Transformers.
        strategies: Which to check; by default all.
        operations: Which to check, of `OPERATIONS`; by default all.
        scoring: Whether `loglikelihood` is checked, too.
        input_ids: A text to take prefixes from; random tokens by default.
        max_tokens: Tokens of a prefix at most: thresholds beyond are not reached, and the report names them.
        thorough: False looks at a few split points only.
        on_step: Called with what is checked next.

    Returns:
        The report: ``passed``, the cells, and a table that ``rich.print`` shows.

    Raises:
        UnknownStrategyError: A strategy that does not exist.
        CacheCapacityError: The texts would be too short, or longer than the model can read.
        InvalidTokensError: ``input_ids`` outside the vocabulary.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
        >>> hpc.check(model, strategies=["prefix-dynamic"], thorough=False).passed
        True
    """
    begun = time.perf_counter()
    for strategy in strategies:
        check_strategy(strategy, available=_CHECKED)
    texts = plan_texts(model, input_ids=input_ids, max_tokens=max_tokens, thorough=thorough)
    oracle = Oracle(model)
    cells: list[CheckCell] = []
    with evaluation_mode(model), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Transformers, on short generations and unusual settings
        for strategy in strategies:
            case = Case(model, strategy, oracle, texts)
            for operation in operations:
                on_step(f"{strategy}: {operation}")
                cells.append(_check_cell(case, operation))
        if scoring:
            on_step("scoring")
            cells.append(_check_scoring(model, oracle, texts))
    return CheckReport(
        model=type(model).__name__,
        model_type=decoder_config(model.config).model_type,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(input_device(model)),
        versions=(("transformers", transformers.__version__), ("torch", torch.__version__)),
        splits=texts.splits,
        suffixes=texts.suffixes,
        not_reached=texts.not_reached,
        cells=tuple(cells),
        seconds=time.perf_counter() - begun,
    )


def _check_cell(case: Case, operation: str) -> CheckCell:
    found = Findings()
    for split in case.splits:
        if case.texts.crosses_regime(split) and operation not in ("forward", "generate"):
            found.notes["not past the length at which rotary frequencies change"] = None
            continue
        _guarded(partial(OPERATIONS[operation], case, split, found), found)
    return _cell(case.strategy, operation, found)


def _check_scoring(model: Any, oracle: Oracle, texts: Texts) -> CheckCell:
    found = Findings()
    name = _guarded(partial(check_scoring, model, oracle, texts, found), found)
    return _cell(name or "scoring", "scores", found)


def _guarded(step: Callable[[], Any], found: Findings) -> Any:
    try:
        return step()
    except PrefixCacheError as error:
        found.refuse(error)
    except Exception as error:  # whatever a modeling file raises is a finding, too
        found.fail(error)
    return None


def _cell(strategy: str, operation: str, found: Findings) -> CheckCell:
    if found.failures:
        outcome = "failed"
    elif found.ratio > 1:
        outcome = "wrong"
    else:
        outcome = "exact" if found.comparisons else "refused"
    errors = found.failures or found.refusals
    return CheckCell(
        strategy=strategy,
        operation=operation,
        outcome=outcome,
        deviation=found.worst if found.comparisons else None,
        tolerance=found.tolerance,
        comparisons=found.comparisons,
        error="; ".join(errors),
        note="; ".join(found.notes),
    )
