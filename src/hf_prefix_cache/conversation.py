"""A conversation that tries things: marks, rollback and commit, on models that can crop and on those that cannot."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from .caches import PrefixCache, PrefixDynamicCache
from .compat import cache_argument
from .exceptions import BatchSizeError, InputMismatchError, SnapshotIncompleteError
from .forward import cache_behind
from .prompts import describe_divergence, encode_prompts
from .snapshot import PrefixSnapshot
from .store import store_for

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Branch", "Mark"]


@dataclass(frozen=True, eq=False)
class Mark:
    """A place in a branch that can be returned to.

    Attributes:
        input_ids: All tokens of the conversation up to here, int64 ``[1, tokens]``.
        snapshot: What has been computed of them: all but the last, which comes with the next turn.

    Example:
        >>> import torch
        >>> Mark(torch.tensor([[1, 2, 3]]), None).input_ids.shape[1]
        3
    """

    input_ids: torch.Tensor
    snapshot: PrefixSnapshot | None


class Branch:
    """A continuation of a snapshot that can be tried, rolled back and committed; made by `PrefixCachedModel.branch`.

    Nothing that is tried reaches the store or the snapshot. Rolling back restores a snapshot, so it also works where
    a window or running state cannot be cropped.

    Args:
        model: The model.
        snapshot: A complete snapshot of one row, verified against the model.
        tokenizer: Needed for text and chat messages.

    Raises:
        SnapshotIncompleteError: The snapshot does not know its tokens or its model.
        FingerprintMismatchError: Another model computed it, or this one in another state.
        BatchSizeError: It has several rows.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
        >>> with model.branch(model.prefill([5, 6, 7])) as branch:
        ...     first = branch.generate([[5, 6, 7, 8]], max_new_tokens=2, do_sample=False)
        ...     branch.rollback()
        ...     second = branch.generate([[5, 6, 7, 9]], max_new_tokens=2, do_sample=False)
        ...     committed = branch.commit()
        >>> committed.input_ids[0, :4].tolist()
        [5, 6, 7, 9]
    """

    def __init__(
        self, model: PreTrainedModel, snapshot: PrefixSnapshot, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        snapshot.verify(model)
        if snapshot.input_ids is None:
            raise SnapshotIncompleteError(
                "the snapshot does not know its token ids; take it with prefill, or with "
                "cache.snapshot(model=..., input_ids=...)"
            )
        if snapshot.batch_size != 1:
            raise BatchSizeError(f"the snapshot has {snapshot.batch_size} rows; a branch continues one row")
        self._model, self._tokenizer = model, tokenizer
        self._marks = [Mark(snapshot.input_ids, snapshot)]
        self._here = self._marks[0]

    @property
    def input_ids(self) -> torch.Tensor:
        """All tokens of the conversation as it stands, int64 ``[1, tokens]``."""
        return self._here.input_ids

    @property
    def snapshot(self) -> PrefixSnapshot | None:
        """What has been computed of them."""
        return self._here.snapshot

    def generate(self, prompt: Any, *, template_options: dict[str, Any] | None = None, **generate_kwargs: Any) -> Any:
        """Generate from a complete prompt, which continues the conversation as it stands.

        What the prompt shares with the conversation is not computed again. Where it leaves the conversation (a chat
        template that rewrites history, say), a warning says so and the longest part they share is used.

        Args:
            prompt: One complete prompt: text, token ids or chat messages.
            template_options: Passed on to the chat template of messages, as to `PrefixCachedModel.prefill`.
            **generate_kwargs: Passed on to ``model.generate``.

        Returns:
            What ``model.generate`` returns; its tokens are now the conversation.

        Raises:
            InputMismatchError: Several prompts, or arguments that ask for several rows.
        """
        options = template_options or {}
        ids, mask = encode_prompts(prompt, model=self._model, tokenizer=self._tokenizer, **options)
        if ids.shape[0] != 1 or (mask is not None and not bool(mask.all())):
            raise InputMismatchError(f"prompt has {ids.shape[0]} rows; a branch continues one conversation")
        divergence = describe_divergence(ids, None, self.input_ids[0], self._tokenizer)
        if divergence:
            warnings.warn(divergence, stacklevel=2)
        cache = self._cache_for(ids.cpu())
        generate: Any = self._model.generate
        # With a mask of ones, a generated token that happens to be the padding token is not taken for padding.
        result = generate(ids, attention_mask=torch.ones_like(ids), **cache_argument(cache), **generate_kwargs)
        sequences = getattr(result, "sequences", result).cpu()
        if sequences.shape[0] != 1 or cache.rows != 1:
            raise InputMismatchError(
                "the call returned several rows; a branch continues one: leave beams and copies out"
            )
        held = min(cache.seq_length, sequences.shape[1])
        snapshot = (
            cache.snapshot(model=self._model, input_ids=sequences[:, :held]) if held == cache.seq_length else None
        )
        self._here = Mark(sequences, snapshot)
        return result

    def mark(self) -> Mark:
        """Remember the conversation as it stands and return the place."""
        self._marks.append(self._here)
        return self._here

    def rollback(self, mark: Mark | None = None) -> None:
        """Return to ``mark``, by default to where the branch began.

        Raises:
            InputMismatchError: The mark is of another branch.
        """
        target = self._marks[0] if mark is None else mark
        if not any(target is known for known in self._marks):
            raise InputMismatchError("mark was not made by this branch; pass what its mark() returned")
        self._here = target

    def commit(self) -> PrefixSnapshot:
        """Keep the conversation as it stands: in the model's store, and as what `rollback` returns to.

        Returns:
            The snapshot of what has been computed: all tokens but the last, which comes with the next turn.
        """
        snapshot = self._here.snapshot
        if snapshot is None:
            raise SnapshotIncompleteError("what was generated last cannot be kept exactly; roll back, then commit")
        store_for(self._model).insert(snapshot)
        self._marks = [self._here]
        return snapshot

    def _cache_for(self, ids: torch.Tensor) -> PrefixCache:
        """Return a cache at the longest prefix of ``ids`` that this place or an earlier mark holds."""
        best: PrefixSnapshot | None = None
        for mark in (self._here, *self._marks):
            snapshot = mark.snapshot
            if snapshot is None or snapshot.input_ids is None:
                continue
            known = snapshot.input_ids[0]
            shown = min(len(known), ids.shape[1])
            different = (known[:shown] != ids[0, :shown]).nonzero()
            length = int(different[0]) if len(different) else shown
            length = min(length, ids.shape[1] - 1)
            if not snapshot.can_crop_to(length):
                continue
            if best is None or length > best.seq_length:
                best = snapshot.crop_to(length)
        if best is not None and best.seq_length:
            return cache_behind(best, 1)
        return PrefixDynamicCache(config=self._model.config)
