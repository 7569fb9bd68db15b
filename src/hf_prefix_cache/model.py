"""`PrefixCachedModel`: a model that computes a prefix once and uses it in generate and forward."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedTokenizerBase

from .budget import MemoryBudget
from .caches import PrefixCache
from .conversation import Branch
from .exceptions import InputMismatchError, UnknownOptionError
from .generation import Warmup, given_prefix, warmup
from .generation.call import CallOptions
from .generation.strategies import CACHE_OPTIONS
from .prefixes import as_snapshot, compute_prefix, known_prefix
from .prompts import describe_divergence, encode_prefix, encode_prompts
from .report import GenerationReport, last_report, record_report
from .scoring import ContinuationScore, encode_pairs, loglikelihood
from .snapshot import PrefixSnapshot
from .store import PrefixStore, set_store
from .strategy import StrategyChoice
from .suffixes import forward_behind
from .validation import check_mask, check_strategy, check_token_ids, vocabulary_size
from .weights import input_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PrefixCachedModel"]


class PrefixCachedModel:
    """Wraps a model (and its tokenizer) for work on a common prefix. The model itself is not changed.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer; needed for text and chat messages.
        strategy: Cache strategy of `prefill`, `generate` and `forward`: ``"prefix-dynamic"``, ``"prefix-static"``,
            ``"prefix-quantized"``, ``"prefix-offloaded"`` or ``"prefix-auto"``, which chooses for each call. Options
            of the quantized and the offloaded one are read from the ``cache_config`` of ``model.generation_config``.
        store: Where prefixes are kept; by default the model's own, see `hpc.store_for`.
        memory_budget: Bytes that prefixes may take: makes a store of that size, and ``"prefix-auto"`` quantizes what
            would not fit exactly into half of it (while a prefix is being kept, it is there twice); `choice` then
            says what was given up.

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
        self._budget: MemoryBudget | None = None
        if memory_budget is not None:
            store = PrefixStore(max_bytes=memory_budget)
            self._budget = MemoryBudget(model, memory_budget) if strategy == "prefix-auto" else None
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
            UnsupportedModelError: The model is in training mode with dropout.
            CacheCapacityError: No strategy keeps the prefix within the budget.

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
            >>> model.prefill([5, 6, 7]).next_logits.shape
            torch.Size([1, 32])
        """
        ids = encode_prefix(prefix, model=self.model, tokenizer=self.tokenizer, **template_options)
        if ids.shape[0] != 1:
            raise InputMismatchError(f"prefix has {ids.shape[0]} rows; a prefix is one row, prefill each on its own")
        if self._budget is not None:
            return self._budget.prefill(ids)
        return compute_prefix(self.model, ids, strategy=self.strategy, options=self._cache_options)

    def generate(
        self,
        prompts: Any,
        *,
        prefix: PrefixSnapshot | PrefixCache | None = None,
        template_options: dict[str, Any] | None = None,
        **generate_kwargs: Any,
    ) -> Any:
        """Generate from complete prompts; what they share with ``prefix`` or with earlier calls is not computed again.

        Args:
            prompts: One or several: text, token ids, or chat messages. Never suffixes alone: only in the complete
                prompt is it certain where tokens end.
            prefix: A snapshot, or a cache that knows its tokens (it is forked, not changed), of one row. The longest
                token prefix that it has in common with the prompts is used; where they leave it, a warning says so.
            template_options: Passed on to the chat template of messages, as to `prefill` (``{"tools": ...}``).
            **generate_kwargs: Passed on to ``model.generate``.

        Returns:
            What ``model.generate`` returns.

        Raises:
            FingerprintMismatchError: ``prefix`` was computed by another model or with other weights.
            SnapshotIncompleteError: ``prefix`` does not know its tokens.
            BatchSizeError: ``prefix`` has several rows.
            InputMismatchError: Prompts of another kind, or a mask beside prompts that are no tensor.

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
            >>> model.generate([[5, 6, 7], [5, 8]], max_new_tokens=2, do_sample=False).shape[0]
            2
        """
        ids, mask = encode_prompts(prompts, model=self.model, tokenizer=self.tokenizer, **(template_options or {}))
        arguments = dict(generate_kwargs)
        if mask is not None and arguments.setdefault("attention_mask", mask) is not mask:
            raise InputMismatchError(
                "attention_mask goes with prompts that are a tensor; other prompts are padded here"
            )
        snapshot = None if prefix is None else known_prefix(self.model, prefix)
        config = arguments.get("generation_config")
        if "cache_implementation" not in arguments and (config is None or config.cache_implementation is None):
            strategy, options = self.strategy, dict[str, Any]()
            if self._budget is not None:
                strategy, options = self._budget.choose_call(ids, arguments, snapshot)
            if config is None:
                arguments["cache_implementation"] = strategy
            else:
                arguments["generation_config"] = config = copy.deepcopy(config)
                config.cache_implementation = strategy
            if options:
                arguments.setdefault("cache_config", options)
        generate: Any = self.model.generate
        if snapshot is None:
            return generate(ids, **arguments)
        settings: Any = self.model.generation_config
        divergence = describe_divergence(
            ids,
            arguments.get("attention_mask"),
            torch.as_tensor(snapshot.input_ids)[0],
            pad_id=settings.pad_token_id,
            tokenizer=self.tokenizer,
        )
        if divergence:
            warnings.warn(divergence, stacklevel=2)
        with given_prefix(self.model, snapshot):
            return generate(ids, **arguments)

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
            (windows, running states, models whose positions cannot skip padding), rows run unpadded, grouped by
            length: logits at padding are then 0, and the output holds no cache. Rows that are so long that the
            model's rotary scaling changes are computed whole, which the report says.

        Raises:
            InvalidTokensError, InputMismatchError: Bad ids or a mask that does not fit.
            FingerprintMismatchError: ``prefix`` was computed by another model or with other weights.
            LossyPrefixError: ``prefix`` is lossy and of another strategy.
            SnapshotIncompleteError: Rows must be computed whole, and ``prefix`` does not know its tokens.
            UnsupportedModelError: Outputs were asked for that grouped rows cannot give.

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
            >>> prefix = model.prefill([5, 6, 7])
            >>> suffixes, mask = torch.tensor([[8, 9], [4, 0]]), torch.tensor([[1, 1], [1, 0]])
            >>> model.forward(suffixes, prefix=prefix, attention_mask=mask).logits.shape
            torch.Size([2, 2, 32])
        """
        ids = check_token_ids(input_ids, vocabulary=vocabulary_size(self.model)).to(input_device(self.model))
        snapshot = as_snapshot(prefix)
        if snapshot.fingerprint is not None:
            snapshot.verify(self.model)
        mask = torch.ones_like(ids, dtype=torch.bool)
        if attention_mask is not None:
            mask = check_mask(attention_mask, rows=ids.shape[0], cached=0, new=ids.shape[1]).to(ids.device)
        options = {} if snapshot.is_lossy else self._cache_options
        strategy = snapshot.strategy if snapshot.is_lossy and self._budget is not None else self.strategy
        output, report = forward_behind(self.model, ids, mask, snapshot, strategy=strategy, options=options, **kwargs)
        record_report(self.model, report)
        return output

    @property
    def choice(self) -> StrategyChoice | None:
        """What `prefill` or `generate` chose last to keep to the budget, and why; None before, or without a budget."""
        return None if self._budget is None else self._budget.choice

    @property
    def _cache_options(self) -> dict[str, Any]:
        """Options of the strategy's cache, as ``generate`` reads them where a call does not say otherwise."""
        if self.strategy not in CACHE_OPTIONS:
            return {}
        settings: Any = self.model.generation_config
        return CallOptions.parse(settings.cache_config, self.strategy).cache

    @contextmanager
    def branch(self, snapshot: PrefixSnapshot) -> Iterator[Branch]:
        """Continue ``snapshot`` on trial: generate, mark, roll back, and commit what is to be kept.

        What is not committed when the block ends is dropped; a committed state is in the model's store, so that the
        next turn's prompt continues from it.

        Args:
            snapshot: A complete snapshot of one row, as `prefill` or `Branch.commit` returns it.

        Raises:
            SnapshotIncompleteError, FingerprintMismatchError, BatchSizeError: The snapshot cannot be continued.

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
            >>> with model.branch(model.prefill([5, 6, 7])) as branch:
            ...     _ = branch.generate([[5, 6, 7, 8]], max_new_tokens=2, do_sample=False)
            ...     kept = branch.commit()
            >>> kept.seq_length
            5
        """
        yield Branch(self.model, snapshot, self.tokenizer)

    def loglikelihood(self, pairs: Iterable[tuple[str, str]], **options: Any) -> list[ContinuationScore]:
        """Score text pairs ``(context, continuation)``, computing what contexts share once.

        Args:
            pairs: The pairs; they are encoded by the rules of lm-evaluation-harness, see `hpc.encode_pairs`.
            **options: Those of `hpc.loglikelihood`.

        Returns:
            One score per pair, in the order asked.

        Raises:
            InputMismatchError: The wrapper has no tokenizer.

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
            >>> try:
            ...     model.loglikelihood([("a", "b")])
            ... except hpc.InputMismatchError as error:
            ...     print(str(error)[:31])
            text pairs need a tokenizer; pa
        """
        if self.tokenizer is None:
            raise InputMismatchError(
                "text pairs need a tokenizer; pass it as PrefixCachedModel(model, tokenizer), or pass token ids to "
                "hpc.loglikelihood"
            )
        return loglikelihood(self.model, encode_pairs(self.tokenizer, pairs), **options)

    def warmup(self, *, max_cache_len: int, batch_sizes: Sequence[int] = (1,), **options: Any) -> Warmup:
        """Compile the decode steps of ``"prefix-static"`` ahead, and keep their buffers; see `hpc.warmup`.

        Args:
            max_cache_len: Tokens that each row may grow to, prompt and new ones.
            batch_sizes: Rows of the batches to come.
            **options: Those of `hpc.warmup`.

        Raises:
            CacheCapacityError, BatchSizeError, UnsupportedModelError: As `hpc.warmup`.

        Example:
            >>> import hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
            >>> try:
            ...     model.warmup(max_cache_len=64)
            ... except hpc.UnsupportedModelError as error:
            ...     print(str(error)[:33])
            Transformers does not compile the
        """
        return warmup(self.model, max_cache_len=max_cache_len, batch_sizes=batch_sizes, **options)

    def report(self) -> GenerationReport | None:
        """Return what the last `generate` or `forward` asked for, reused and computed; None before the first.

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = hpc.PrefixCachedModel(LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval())
            >>> model.report() is None
            True
        """
        return last_report(self.model)
