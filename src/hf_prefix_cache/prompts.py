"""Prompts in every form that users have them in (text, token ids, chat messages) as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .exceptions import InputMismatchError
from .validation import check_token_ids, vocabulary_size

__all__ = ["EncodedPrompts", "encode_prefix", "encode_prompts"]

EncodedPrompts = tuple[torch.Tensor, torch.Tensor]
"""Token ids and mask, int64 ``[rows, columns]`` each, padded on the left."""


def encode_prompts(
    prompts: Any, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **template_options: Any
) -> EncodedPrompts:
    """Return complete prompts as left-padded token ids.

    Args:
        prompts: One prompt or several: text, token ids (a tensor ``[tokens]`` or ``[rows, tokens]``, or lists of ints
            of any lengths), or chat messages, which get a generation prompt.
        model: The model they are for.
        tokenizer: Needed for text and messages.
        **template_options: Passed on to the chat template.

    Raises:
        InputMismatchError: Text or messages without a tokenizer, or no prompt at all.
        InvalidTokensError: Ids that are empty, not integers or out of the vocabulary.
    """
    if isinstance(prompts, torch.Tensor):
        ids = check_token_ids(prompts, name="prompts", vocabulary=vocabulary_size(model)).to(model.device)
        return ids, torch.ones_like(ids)
    items = prompts if _is_batch(prompts) else [prompts]
    if not items:
        raise InputMismatchError("prompts is empty; pass at least one prompt")
    rows = [_encode(item, tokenizer, {"add_generation_prompt": True, **template_options}) for item in items]
    vocabulary = vocabulary_size(model)
    tensors = [check_token_ids(row, name="prompts", vocabulary=vocabulary)[0] for row in rows]
    pad = _pad_id(model, tokenizer)
    columns = max(len(row) for row in tensors)
    ids = torch.full((len(tensors), columns), pad, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(tensors):
        ids[index, columns - len(row) :] = row
        mask[index, columns - len(row) :] = 1
    return ids.to(model.device), mask.to(model.device)


def encode_prefix(
    prefix: Any, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **template_options: Any
) -> torch.Tensor:
    """Return the token ids ``[1, tokens]`` of a prefix; of messages, what any continuation of them begins with.

    Raises:
        InputMismatchError: Text or messages without a tokenizer.
        InvalidTokensError: Ids that are empty, not integers or out of the vocabulary.
    """
    if _is_messages(prefix):
        first, second = (
            _encode([*prefix, _next_message(prefix, content)], tokenizer, template_options)
            for content in ("Alpha first.", "Other second!")
        )
        same = [left == right for left, right in zip(first, second, strict=False)]
        prefix = first[: same.index(False)] if False in same else first[: len(same)]
    elif isinstance(prefix, str):
        prefix = _encode(prefix, tokenizer, {})
    return check_token_ids(prefix, name="prefix", vocabulary=vocabulary_size(model))


def _next_message(messages: Sequence[Mapping[str, Any]], content: str) -> dict[str, str]:
    answered = messages[-1]["role"] in ("assistant", "system", "developer")
    return {"role": "user" if answered else "assistant", "content": content}


def _encode(item: Any, tokenizer: PreTrainedTokenizerBase | None, template_options: dict[str, Any]) -> list[int]:
    if isinstance(item, torch.Tensor):
        return [int(token) for token in item.reshape(-1)]
    if not isinstance(item, str) and not _is_messages(item):
        return list(item)
    if tokenizer is None:
        raise InputMismatchError(
            "text and chat messages need a tokenizer; pass it as PrefixCachedModel(model, tokenizer), or pass ids"
        )
    if isinstance(item, str):
        return list(tokenizer(item)["input_ids"])
    encoded = tokenizer.apply_chat_template(list(item), tokenize=True, return_dict=True, **template_options)
    return list(encoded["input_ids"])


def _is_messages(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and all(isinstance(entry, Mapping) for entry in item)


def _is_batch(prompts: Any) -> bool:
    if isinstance(prompts, str) or _is_messages(prompts):
        return False
    return not prompts or not all(isinstance(entry, int) for entry in prompts)


def _pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    candidates = [
        getattr(tokenizer, "pad_token_id", None),
        model.generation_config.pad_token_id,
        getattr(tokenizer, "eos_token_id", None),
        model.generation_config.eos_token_id,
    ]
    for candidate in candidates:
        if isinstance(candidate, list):
            candidate = candidate[0]
        if candidate is not None:
            return int(candidate)
    return 0
