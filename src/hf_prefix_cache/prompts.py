"""Prompts in every form that users have them in (text, token ids, chat messages) as token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from .exceptions import InputMismatchError
from .validation import check_token_ids, vocabulary_size
from .weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["EncodedPrompts", "describe_divergence", "encode_prefix", "encode_prompts"]

EncodedPrompts = tuple[torch.Tensor, torch.Tensor | None]
"""Token ids, int64 ``[rows, columns]``, padded on the left, and the mask of them where we padded."""


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

    Returns:
        Ids and mask. A tensor of ids stays as it is and gets no mask: Transformers finds its padding as always.

    Raises:
        InputMismatchError: Text or messages without a tokenizer, no prompt at all, or a mapping.
        InvalidTokensError: Ids that are empty, not integers or out of the vocabulary.
    """
    if isinstance(prompts, Mapping):
        raise InputMismatchError(
            f"prompts is a {type(prompts).__name__}; pass a list of messages, or of a tokenizer's output its "
            "input_ids, with attention_mask=... beside them"
        )
    vocabulary = vocabulary_size(model)
    if isinstance(prompts, torch.Tensor | np.ndarray):
        ids = check_token_ids(torch.as_tensor(prompts), name="prompts", vocabulary=vocabulary)
        return ids.to(input_device(model)), None
    items = prompts if _is_batch(prompts) else [prompts]
    if not items:
        raise InputMismatchError("prompts is empty; pass at least one prompt")
    rows = [_encode(item, tokenizer, {"add_generation_prompt": True, **template_options}) for item in items]
    tensors = [check_token_ids(row, name="prompts", vocabulary=vocabulary)[0] for row in rows]
    columns = max(len(row) for row in tensors)
    ids = torch.full((len(tensors), columns), _pad_id(model, tokenizer), dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for index, row in enumerate(tensors):
        ids[index, columns - len(row) :] = row
        mask[index, columns - len(row) :] = 1
    device = input_device(model)
    return ids.to(device), mask.to(device)


def encode_prefix(
    prefix: Any, *, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, **template_options: Any
) -> torch.Tensor:
    """Return the token ids ``[1, tokens]`` of a prefix; of messages, what any continuation of them begins with.

    Raises:
        InputMismatchError: Text or messages without a tokenizer, or a mapping.
        InvalidTokensError: Ids that are empty, not integers or out of the vocabulary.
    """
    if isinstance(prefix, Mapping):
        raise InputMismatchError(
            f"prefix is a {type(prefix).__name__}; pass a list of messages, or the input_ids of a tokenizer's output"
        )
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


def describe_divergence(
    input_ids: torch.Tensor,
    mask: torch.Tensor | None,
    prefix_ids: torch.Tensor,
    tokenizer: Any = None,
    *,
    pad_id: int | None = None,
) -> str:
    """Return where the first prompt that leaves a prefix leaves it, in words; empty if all prompts agree with it.

    Args:
        input_ids: The prompts, ``[rows, columns]``.
        mask: 1 at their tokens and 0 at padding, ``[rows, columns]``; None where it is to be inferred.
        prefix_ids: The prefix, ``[tokens]``.
        tokenizer: Shows the two tokens as text.
        pad_id: Without a mask, ids before a prompt that are padding.
    """
    for row, ids in enumerate(input_ids.cpu()):
        is_token = (ids != pad_id).long().cummax(0).values if mask is None and pad_id is not None else None
        if mask is not None:
            is_token = mask[row].cpu()
        tokens = ids if is_token is None else ids[is_token.bool()]
        length = min(len(tokens), len(prefix_ids))
        different = (tokens[:length] != prefix_ids[:length].cpu()).nonzero()
        if not len(different):
            continue
        index = int(different[0])
        pair = [int(tokens[index]), int(prefix_ids[index])]
        theirs, ours = pair if tokenizer is None else [repr(tokenizer.decode([token])) for token in pair]
        return (
            f"prompt {row} leaves the prefix at token {index} of {len(prefix_ids)} ({theirs} in the prompt, {ours} in "
            "the prefix): what follows is not reused from it"
        )
    return ""


def _next_message(messages: Sequence[Mapping[str, Any]], content: str) -> dict[str, str]:
    answered = messages[-1].get("role") in ("assistant", "system", "developer")
    return {"role": "user" if answered else "assistant", "content": content}


def _encode(item: Any, tokenizer: PreTrainedTokenizerBase | None, template_options: dict[str, Any]) -> list[int]:
    if isinstance(item, torch.Tensor | np.ndarray):
        return [int(token) for token in item.reshape(-1)]
    if not isinstance(item, str) and not _is_messages(item):
        if not isinstance(item, Sequence):
            raise InputMismatchError(f"a prompt is {item!r}; pass text, token ids, or a list of chat messages")
        return list(item)
    if tokenizer is None:
        raise InputMismatchError(
            "text and chat messages need a tokenizer; pass it as PrefixCachedModel(model, tokenizer), or pass ids"
        )
    encoded: Any
    if isinstance(item, str):
        encoded = tokenizer(item)
    else:
        encoded = tokenizer.apply_chat_template(list(item), tokenize=True, return_dict=True, **template_options)
    return list(encoded["input_ids"])


def _is_messages(item: Any) -> bool:
    return isinstance(item, list | tuple) and bool(item) and all(isinstance(entry, Mapping) for entry in item)


def _is_batch(prompts: Any) -> bool:
    if isinstance(prompts, str) or _is_messages(prompts):
        return False
    return not prompts or not all(isinstance(entry, Integral) for entry in prompts)


def _pad_id(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> int:
    config: Any = model.generation_config
    candidates = [
        getattr(tokenizer, "pad_token_id", None),
        config.pad_token_id,
        getattr(tokenizer, "eos_token_id", None),
        config.eos_token_id,
    ]
    for candidate in candidates:
        if isinstance(candidate, list):
            candidate = candidate[0]
        if candidate is not None:
            return int(candidate)
    return 0
