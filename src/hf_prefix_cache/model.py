"""`PrefixCachedModel`: a model that computes a prefix once and uses it in generate and forward."""

import inspect
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .caches import PrefixCache, PrefixDynamicCache
from .compat import cache_argument
from .exceptions import InputMismatchError, SnapshotIncompleteError, UnknownOptionError
from .fingerprint import fingerprint_of
from .forward import feed
from .generation import given_prefix
from .prompts import encode_prefix, encode_prompts
from .report import GenerationReport, last_report
from .snapshot import PrefixSnapshot
from .store import PrefixStore, set_store, store_for
from .suffixes import forward_grouped
from .validation import check_mask, check_strategy, check_token_ids, vocabulary_size

__all__ = ["PrefixCachedModel"]

# Tokens of a prefix per forward call: bounds the memory of activations, and is long enough to keep the machine busy.
_CHUNK = 2048


class PrefixCachedModel:
    """Wraps a model (and its tokenizer) for work on a common prefix. The model itself is not changed.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer; needed for text and chat messages.
        strategy: Cache strategy of `generate` and `forward`: ``"prefix-dynamic"``, ``"prefix-static"`` or
            ``"prefix-auto"``, which chooses for each call.
        store: Where prefixes are kept; by default the model's own, see `hpc.store_for`.
        memory_budget: Bytes that kept prefixes may take; makes a store of that size.

    Raises:
        UnknownStrategyError: Another strategy.
        UnknownOptionError: Both a store and a budget.

    Example:
        >>> import torch, hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
        >>> prefix = model.prefill([5, 6, 7, 8])
        >>> model.generate([[5, 6, 7, 8, 9]], prefix=prefix, max_new_tokens=2, do_sample=False).shape[1] > 5
        True
        >>> model.report().reused_tokens
        4
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        strategy: str = "prefix-auto",
        store: PrefixStore | None = None,
        memory_budget: int | None = None,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.strategy = check_strategy(strategy)
        if store is not None and memory_budget is not None:
            raise UnknownOptionError("pass either store or memory_budget: a store has a budget of its own")
        if memory_budget is not None:
            store = PrefixStore(max_bytes=memory_budget)
        if store is not None:
            set_store(model, store)

    @torch.no_grad()
    def prefill(self, prefix: Any, **template_options: Any) -> PrefixSnapshot:
        """Compute a prefix, or the part of it that is not known yet, and return it as a complete snapshot.

        Args:
            prefix: Text, token ids (``[tokens]`` or ``[1, tokens]``), or chat messages, of which the tokens are kept
                that every continuation of the template begins with.
            **template_options: Passed on to the chat template (``tools=...`` and the like).

        Returns:
            A snapshot with token ids, next logits and fingerprint.

        Raises:
            InputMismatchError: Text without a tokenizer, or several rows.
            InvalidTokensError: Ids that are empty, not integers or out of the vocabulary.
        """
        ids = encode_prefix(prefix, model=self.model, tokenizer=self.tokenizer, **template_options)
        if ids.shape[0] != 1:
            raise InputMismatchError(f"prefix has {ids.shape[0]} rows; a prefix is one row, prefill each on its own")
        store, fingerprint = store_for(self.model), fingerprint_of(self.model)
        known = store.match(ids[0], fingerprint)
        if known is not None and known.seq_length == ids.shape[1] and known.next_logits is not None:
            return known
        if known is not None and known.seq_length == ids.shape[1]:
            known = known.crop_to(known.seq_length - 1)  # windows hold one token more than they need
        cache = PrefixDynamicCache(config=self.model.config)
        start = 0
        if known is not None:
            cache.load(known, batch_size=1)
            start = known.seq_length
        logits = feed(self.model, ids[:, start:], cache, chunk_size=_CHUNK)
        snapshot = cache.snapshot(model=self.model, input_ids=ids, next_logits=logits)
        store.insert(snapshot)
        return snapshot

    def generate(
        self, prompts: Any, *, prefix: PrefixSnapshot | PrefixCache | None = None, **generate_kwargs: Any
    ) -> Any:
        """Generate from complete prompts; what they share with ``prefix`` or with earlier calls is not computed again.

        Args:
            prompts: One or several: text, token ids, or chat messages. Never suffixes alone: only in the complete
                prompt is it certain where tokens end.
            prefix: A snapshot, or a cache that knows its tokens (it is forked, not changed). The longest token prefix
                that it has in common with the prompts is used.
            **generate_kwargs: Passed on to ``model.generate``.

        Returns:
            What ``model.generate`` returns.

        Raises:
            FingerprintMismatchError: ``prefix`` was computed by another model or with other weights.
            SnapshotIncompleteError: ``prefix`` does not know its tokens.
        """
        ids, mask = encode_prompts(prompts, model=self.model, tokenizer=self.tokenizer)
        arguments = {"attention_mask": mask, "cache_implementation": self.strategy, **generate_kwargs}
        if prefix is None:
            return self.model.generate(ids, **arguments)
        with given_prefix(self.model, self._snapshot(prefix)):
            return self.model.generate(ids, **arguments)

    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        prefix: PrefixSnapshot | PrefixCache,
        attention_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model on suffixes behind ``prefix``.

        Args:
            input_ids: The suffixes' tokens, ``[rows, tokens]``, padded on either side.
            prefix: A snapshot or a cache of one row, shared by all rows; it is not changed.
            attention_mask: 1 for tokens and 0 for padding, ``[rows, tokens]``; None where nothing is padded.
            **kwargs: Passed on to the model.

        Returns:
            The model's own output; ``logits`` is ``[rows, tokens, vocab]``. Where padding cannot be masked exactly
            (windows, models without ``position_ids``), rows run unpadded, grouped by length: logits at padding are
            then 0, and the output holds no cache.

        Raises:
            InvalidTokensError, InputMismatchError: Bad ids or a mask that does not fit.
            FingerprintMismatchError: ``prefix`` was computed by another model or with other weights.
            UnsupportedModelError: Outputs were asked for that grouped rows cannot give.
        """
        ids = check_token_ids(input_ids, vocabulary=vocabulary_size(self.model)).to(self.model.device)
        snapshot = prefix.snapshot() if isinstance(prefix, PrefixCache) else prefix
        if snapshot.fingerprint is not None:
            snapshot.verify(self.model)
        rows, new = ids.shape
        mask = torch.ones_like(ids, dtype=torch.bool)
        if attention_mask is not None:
            mask = check_mask(attention_mask, rows=rows, cached=0, new=new).to(ids.device)
        if not bool(mask.all()) and not _can_mask(self.model, snapshot):
            return forward_grouped(self.model, ids, mask, snapshot, **kwargs)
        options = {"max_cache_len": snapshot.seq_length + new} if self.strategy == "prefix-static" else {}
        name = "prefix-static" if options else "prefix-dynamic"
        cache = snapshot.to_cache(name, batch_size=rows, **options)
        prepared = cache.prepare_inputs(ids, None if bool(mask.all()) else mask)
        return self.model(**prepared._asdict(), **cache_argument(cache), **kwargs)

    def report(self) -> GenerationReport | None:
        """Return what the last `generate` asked for, reused and computed; None before the first."""
        return last_report(self.model)

    def _snapshot(self, prefix: PrefixSnapshot | PrefixCache) -> PrefixSnapshot:
        if isinstance(prefix, PrefixSnapshot):
            if prefix.input_ids is None:
                raise SnapshotIncompleteError(
                    "prefix does not know its token ids, so nothing can be matched; take it with "
                    "cache.snapshot(model=..., input_ids=...), or with prefill"
                )
            return prefix
        known = prefix.known_ids
        if known is None:
            raise SnapshotIncompleteError(
                "the cache passed as prefix does not know its token ids; pass cache.snapshot(model=..., input_ids=...)"
            )
        fork = prefix.fork()
        fork.crop_to(known.shape[1])
        return fork.snapshot(model=self.model, input_ids=known)


def _can_mask(model: PreTrainedModel, snapshot: PrefixSnapshot) -> bool:
    """Return whether padding between prefix and suffix can be masked exactly."""
    windows = any(layer.window is not None for layer in snapshot.layers)
    return not windows and "position_ids" in inspect.signature(model.forward).parameters
