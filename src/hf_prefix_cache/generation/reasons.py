"""Why a prompt cannot be reused, in words: the rules that keep reuse exact."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..architectures import positions_follow_mask, positions_from_padding_id
from ..compat import CACHE_ARGUMENT, original_max_positions
from ..snapshot import PrefixSnapshot
from .batch import PromptBatch, positions_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["computes_randomly", "passes_only_ids", "why_not_beside", "why_not_by_ids", "within_one_regime"]

# What `generate` passes to every forward of a text model. Anything else may decide numbers (images, embeddings) or ask
# for outputs of the whole prompt (hidden states, attentions).
_PLAIN_ARGUMENTS = frozenset({"attention_mask", "position_ids", "use_cache", "logits_to_keep", CACHE_ARGUMENT})
_RANDOM_ENTRIES = ("dropout", "pdrop", "drop_path", "layerdrop", "jitter")


def why_not_by_ids(model: PreTrainedModel, batch: PromptBatch | None, model_kwargs: dict[str, Any]) -> str:
    """Return why token ids do not show what is computed, so that nothing is reused or kept, or an empty string.

    Args:
        model: The model.
        batch: The prompts, or None where their padding is not on the left alone.
        model_kwargs: What `generate` passes to the model.
    """
    extra = _extra_arguments(model_kwargs)
    if extra:
        return f"the call passes {', '.join(extra)}, which token ids alone do not show"
    if batch is None:
        return "padding is not on the left alone"
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    if positions is not None:
        counted = torch.arange(batch.columns) if mask is None else positions_of(mask).cpu()
        counted = counted.expand_as(positions) if positions.ndim == 2 else counted
        if positions.shape != counted.shape or not torch.equal(positions.cpu(), counted):
            return "the call passes position_ids of its own"
    if positions_from_padding_id(model.config):
        return "the model's generate counts positions otherwise than its forward, which computes prefixes"
    if computes_randomly(model):
        return "the model is in training mode with dropout, and every computation of the prompt is another one"
    limit = original_max_positions(model.config)
    if limit is not None and batch.longest > limit:
        return f"the prompt is longer than {limit} tokens, where the model's rotary scaling changes"
    return ""


def passes_only_ids(model_kwargs: dict[str, Any]) -> bool:
    """Return whether `generate` passes nothing to the model beside ids, their mask and their positions."""
    return not _extra_arguments(model_kwargs)


def _extra_arguments(model_kwargs: dict[str, Any]) -> list[str]:
    return sorted(
        name
        for name, value in model_kwargs.items()
        if name not in _PLAIN_ARGUMENTS and value is not None and value is not False
    )


def why_not_beside(model: PreTrainedModel, batch: PromptBatch, *, has_windows: bool, max_length: int) -> str:
    """Return why the rows of ``batch`` cannot share a prefix or continue one, or an empty string.

    Args:
        model: The model.
        batch: The prompts.
        has_windows: Whether a layer attends to a window only.
        max_length: Columns that the sequences can grow to.
    """
    if not batch.is_padded:
        return ""
    if has_windows:
        return "rows are padded, and padding between prefix and suffix would shift the model's windows"
    if not positions_follow_mask(model.config):
        return "rows are padded, and the model's positions cannot skip padding"
    limit = original_max_positions(model.config)
    if limit is not None and max_length > limit:
        # Some models drop their cache there and compute the columns anew, in the order in which they were passed.
        return f"rows are padded and may grow beyond {limit} tokens, where the model's rotary scaling changes"
    return ""


def computes_randomly(model: PreTrainedModel) -> bool:
    """Return whether two computations of the same tokens differ, as with dropout in training mode."""
    if any(module.training and isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules()):
        return True
    entries = model.config.to_dict().items()
    return any(module.training for module in model.modules()) and any(
        isinstance(value, float) and value > 0 and any(part in name for part in _RANDOM_ENTRIES)
        for name, value in entries
    )


def within_one_regime(model: PreTrainedModel, prefix: PrefixSnapshot, *, length: int) -> bool:
    """Return whether ``prefix`` was computed with the rotary frequencies that ``length`` tokens in all are given."""
    limit = original_max_positions(model.config)
    return limit is None or max(prefix.seq_length, length) <= limit
