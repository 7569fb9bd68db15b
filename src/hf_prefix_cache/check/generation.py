"""``generate`` on a prefix from the store, against the uncached model, which is fed the tokens that were generated."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from ..architectures import positions_follow_mask
from ..oracle import Ids
from ..report import last_report
from ..scoring.model_access import input_device
from ..store import PrefixStore, set_store, store_for
from .case import Case, Findings
from .texts import QUANTIZED_OPTIONS, special_tokens

__all__ = ["check_generate"]

_NEW = 2  # tokens that are generated: one by the prefill, one by a decoding step
_STORE_BYTES = 2**30


def check_generate(case: Case, split: int, to: Findings) -> None:
    """The same prompt twice, a longer one that begins with it, and a padded batch of both."""
    prefix, (first, second, _) = case.prefix(split), case.texts.streams
    before = store_for(case.model)
    set_store(case.model, PrefixStore(max_bytes=_STORE_BYTES))
    try:
        if case.is_quantized:
            _compare_with_itself(case, prefix, to)
        else:
            for prompts in ([prefix], [prefix], [prefix + first[:7]]):
                _compare_with_uncached(case, prompts, to)
            if positions_follow_mask(case.model.config):
                _compare_with_uncached(case, [prefix + second[:2], prefix + first[:7]], to)
            else:
                to.notes["its positions count padding, in plain Transformers too: no padded batch was compared"] = None
    finally:
        set_store(case.model, before)


def _compare_with_itself(case: Case, prompt: Ids, to: Findings) -> None:
    """What is generated on a quantized prefix may not depend on whether it was computed now, or found."""
    anew, found = _generate(case, [prompt]), _generate(case, [prompt])
    for step, right in zip(found.logits, anew.logits, strict=True):
        to.add(*case.oracle.judge(step, right.float().cpu(), prompt[:-1], prompt[-1:]))


def _compare_with_uncached(case: Case, prompts: list[Ids], to: Findings) -> None:
    output = _generate(case, prompts)
    report = last_report(case.model)
    if report is not None and report.reason:
        to.notes[report.reason] = None
    width = max(len(prompt) for prompt in prompts)
    special, plain = special_tokens(case.model), None
    for row, prompt in enumerate(prompts):
        written = tuple(output.sequences[row, width:].tolist())
        ends = [place for place, token in enumerate(written) if token in special]
        written = written[: ends[0] + 1] if ends else written  # what follows its end is padding
        fed = prompt[-1:] + written[:-1]
        found = torch.stack([step[row] for step in output.logits[: len(fed)]])
        deviation, tolerance = case.oracle.judge(found, case.oracle.after(prompt[:-1], fed), prompt[:-1], fed)
        if deviation > tolerance:
            # Some models count positions otherwise in generate, or with padding: then plain generate is right, too.
            plain = plain or _generate(case, prompts, plain=True)
            right = torch.stack([step[row] for step in plain.logits[: len(fed)]])
            deviation, tolerance = case.oracle.judge(found, right.float().cpu(), prompt[:-1], fed)
        to.add(deviation, tolerance)


def _generate(case: Case, prompts: list[Ids], *, plain: bool = False) -> Any:
    width = max(len(prompt) for prompt in prompts)
    padding = 0
    ids = torch.tensor([[padding] * (width - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = GenerationConfig(
        max_new_tokens=_NEW,
        do_sample=False,
        num_beams=1,
        use_cache=True,
        pad_token_id=padding,
        output_logits=True,
        return_dict_in_generate=True,
        cache_implementation=None if plain else case.strategy,
        cache_config=QUANTIZED_OPTIONS if case.is_quantized else None,
    )
    device = input_device(case.model)
    return case.model.generate(ids.to(device), attention_mask=mask.to(device), generation_config=settings)
