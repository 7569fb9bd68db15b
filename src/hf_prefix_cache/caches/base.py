"""What all prefix caches can do beyond Transformers' caches: snapshot, restore, fork and crop."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..architectures import why_no_cache
from ..compat import LayerSpec, decoder_config, layer_specs, refuse_cache_keyword
from ..exceptions import (
    BatchSizeError,
    FingerprintMismatchError,
    InputMismatchError,
    LossyPrefixError,
    UnsupportedLayerError,
    UnsupportedModelError,
)
from ..fingerprint import fingerprint_of, same_architecture
from ..layers import DYNAMIC_KINDS, LayerState, NothingState
from ..layers.portable import portable
from ..snapshot import PrefixSnapshot
from ..storage import storage_bytes
from ..validation import check_token_ids, vocabulary_size
from .editing import EditableCache

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["PrefixCache", "attention_layers", "total_nbytes"]

_Self = TypeVar("_Self", bound="PrefixCache")
_ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")


def attention_layers(config: PreTrainedConfig, cache_name: str, kinds: Container[str] = _ATTENTION) -> list[LayerSpec]:
    """Return what each layer of ``config`` keeps, if it is one of ``kinds``.

    Raises:
        UnsupportedLayerError: Another kind.
        UnsupportedModelError: The model has an encoder, whose cross-attention needs a cache of its own, or keeps no
            `Cache` of Transformers.
    """
    if decoder_config(config).is_encoder_decoder:
        raise UnsupportedModelError(
            f"{type(config).__name__} describes a model with an encoder, which {cache_name} does not serve; use "
            "Transformers' EncoderDecoderCache"
        )
    obstacle = why_no_cache(config)
    if obstacle:
        raise UnsupportedModelError(
            f"{type(config).__name__} describes a model that {cache_name} does not serve: {obstacle}"
        )
    specs = layer_specs(config)
    for index, spec in enumerate(specs):
        if spec.kind not in kinds:
            grows = all(other.kind in DYNAMIC_KINDS for other in specs)
            remedy = "prefix-dynamic or prefix-offloaded" if grows else "Transformers' own cache"
            raise UnsupportedLayerError(
                f"layer {index} of {type(config).__name__} is of the kind {spec.kind!r}, which {cache_name} does not "
                f"hold exactly; use {remedy} for this model"
            )
    return specs


class PrefixCache(EditableCache):
    """Base of all prefix caches; see `PrefixDynamicCache` and `PrefixStaticCache`.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig
        >>> isinstance(hpc.PrefixDynamicCache(config=LlamaConfig(num_hidden_layers=2)), hpc.PrefixCache)
        True
    """

    strategy: str
    is_lossy: bool = False  # whether less is held than the model computed
    _options: dict[str, Any]

    def __new__(cls, *_: Any, **__: Any) -> PrefixCache:
        """Make a cache; the first one of a process makes old Transformers releases refuse what they would ignore."""
        refuse_cache_keyword(PrefixCache)
        return super().__new__(cls)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor of keys and values held, spare room included."""
        return [tensor for layer in self.layers for tensor in layer.tensors()]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor storage held, spare room included; storage shared between layers counts once."""
        return storage_bytes(self.tensors)

    def snapshot(
        self,
        *,
        model: PreTrainedModel | None = None,
        input_ids: torch.Tensor | None = None,
        next_logits: torch.Tensor | None = None,
    ) -> PrefixSnapshot:
        """Return what is held as an immutable value.

        Growing layers are not copied, static buffers are. The snapshot is detached from the autograd graph; `fork`
        is not.

        Args:
            model: The model that filled the cache; gives the snapshot its fingerprint.
            input_ids: The token ids held, ``[seq_length]`` or ``[rows, seq_length]``.
            next_logits: Logits after the last token, ``[vocab]`` or ``[rows, vocab]``.

        Returns:
            The snapshot. What is not passed stays None: such a snapshot can be restored and forked, not stored.

        Raises:
            InputMismatchError: The cache is empty, or ids or logits do not fit what is held.
            InvalidTokensError: Ids that are not integers or out of the vocabulary.
            FingerprintMismatchError: ``model`` has another configuration than the cache was made for.

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from hf_prefix_cache.compat import cache_argument
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
            >>> cache = hpc.PrefixDynamicCache(config=model.config)
            >>> _ = model(torch.tensor([[1, 2, 3]]), **cache_argument(cache))
            >>> cache.snapshot().seq_length
            3
        """
        length, rows = self.seq_length, self.rows
        if not length or rows is None:
            raise InputMismatchError("the cache is empty; run a forward with it before taking a snapshot")
        if model is not None and not same_architecture(decoder_config(model.config), self._config):
            raise FingerprintMismatchError(
                f"the cache was made for another configuration than that of the {type(model).__name__} passed as "
                "model; pass the model that filled it"
            )
        if input_ids is not None:
            vocabulary = None if model is None else vocabulary_size(model)
            input_ids = check_token_ids(input_ids, vocabulary=vocabulary, config=self._config).cpu().clone()
            if input_ids.shape not in ((rows, length), (1, length)):
                raise InputMismatchError(
                    f"input_ids has shape {list(input_ids.shape)} but the cache holds {rows} rows of {length} tokens"
                )
        if next_logits is not None:
            next_logits = next_logits.detach().reshape(-1, next_logits.shape[-1]).clone()
            if next_logits.shape[0] not in (1, rows):
                raise InputMismatchError(f"next_logits has {next_logits.shape[0]} rows but the cache holds {rows}")
        return PrefixSnapshot(
            layers=tuple(_after(length, layer.share().detach()) for layer in self.layers),
            seq_length=length,
            batch_size=rows,
            strategy=self.strategy,
            config=self._config,
            input_ids=input_ids,
            next_logits=next_logits,
            fingerprint=None if model is None else fingerprint_of(model),
            padding_mask=self.padding_mask,
            is_lossy=self.is_lossy,
        )

    def restore(self, snapshot: PrefixSnapshot) -> None:
        """Put this cache at ``snapshot``, in place; a static cache keeps its tensors' addresses.

        Raises:
            InputMismatchError: The snapshot belongs to another architecture.
            LossyPrefixError: The snapshot is lossy and of another strategy.
            BatchSizeError, CacheCapacityError: The snapshot does not fit a static cache.
        """
        self.load(snapshot, batch_size=snapshot.batch_size)

    def load(self, snapshot: PrefixSnapshot, *, batch_size: int, allow_lossy: bool = False) -> None:
        """Put this cache at ``snapshot`` with ``batch_size`` rows, in place.

        Args:
            snapshot: Where to start.
            batch_size: Rows of this cache from now on.
            allow_lossy: Load a lossy snapshot of another strategy all the same.

        Raises:
            InputMismatchError: The snapshot belongs to another architecture.
            LossyPrefixError: The snapshot is lossy, of another strategy, and ``allow_lossy`` was not given.
            BatchSizeError, CacheCapacityError: It does not fit.
        """
        self._check_batch_size(batch_size, snapshot.batch_size)
        if not same_architecture(snapshot.config, self._config):
            raise InputMismatchError(
                f"the snapshot was taken with a {type(snapshot.config).__name__} and this cache was made for a "
                f"{type(self._config).__name__} with other settings; use a cache made for the snapshot's model"
            )
        is_foreign = snapshot.strategy != self.strategy
        if snapshot.is_lossy and is_foreign and not allow_lossy:
            raise LossyPrefixError(
                f"the snapshot was filled by {snapshot.strategy!r}, which is lossy, and this is a {self.strategy!r} "
                "cache; use snapshot.to_cache with allow_lossy=True to continue it all the same"
            )
        states = [portable(state) for state in snapshot.layers] if is_foreign else snapshot.layers
        for layer, state in zip(self.layers, states, strict=True):
            layer.check_load(state, batch_size)
        for layer, state in zip(self.layers, states, strict=True):
            layer.load(state, batch_size)
        self.is_lossy = type(self).is_lossy or snapshot.is_lossy
        mask = snapshot.padding_mask
        self._padding = None if mask is None else mask.expand(batch_size, -1)
        self._known_ids = snapshot.input_ids

    def fork(self: _Self, batch_size: int | None = None) -> _Self:
        """Return a new cache of the same kind that starts at this one's state; neither sees the other's later tokens.

        Growing caches share the prefix: it is stored once, however many forks and rows there are. Static buffers are
        copied. Unlike a snapshot, the fork of a growing cache stays part of the autograd graph.

        Args:
            batch_size: Rows of the fork: None keeps those of this cache, a number expands a batch of 1.

        Raises:
            BatchSizeError: A number for a cache whose batch is not 1, or a number below 1.
        """
        make: Callable[..., _Self] = type(self)
        forked = make(config=self._config, **self._options)
        rows = self.rows
        wanted = batch_size if batch_size is not None else rows or 1
        self._check_batch_size(wanted, rows or 1)
        for layer, own in zip(forked.layers, self.layers, strict=True):
            layer.load(own.share(), wanted)
            if getattr(own, "record_past", False):
                layer.activate_past_recording()
        forked.is_lossy = self.is_lossy
        padding = self.padding_mask
        forked._padding = None if padding is None else padding.expand(wanted, -1)
        forked._known_ids = self.known_ids
        return forked

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self.fork()

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.is_lossy = type(self).is_lossy

    @staticmethod
    def _check_batch_size(wanted: int, held: int) -> None:
        if wanted < 1 or held not in (1, wanted):
            raise BatchSizeError(
                f"batch_size is {wanted} but {held} rows are held; a batch of 1 can be expanded to any number, "
                "another one keeps its rows"
            )


def _after(length: int, state: LayerState) -> LayerState:
    """Return ``state``, told how many tokens the cache holds where the layer could not know."""
    return replace(state, length=length) if isinstance(state, NothingState) else state


def total_nbytes(caches: Iterable[Cache | PrefixSnapshot]) -> int:
    """Return the bytes of tensor storage held by ``caches`` together; storage shared between them counts once.

    Args:
        caches: Any iterable of caches, Transformers' own among them, and snapshots.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> hpc.total_nbytes([])
        0
    """
    return storage_bytes(tensor for item in caches for tensor in _tensors_of(item))


def _tensors_of(item: Cache | PrefixSnapshot) -> list[torch.Tensor]:
    if isinstance(item, PrefixCache | PrefixSnapshot):
        return item.tensors
    if not isinstance(item, Cache):
        raise InputMismatchError(f"caches holds a {type(item).__name__}; it must hold caches and snapshots")
    # Layers of other kinds hold other things: whatever tensors they have, alone or in dicts.
    held = [value for layer in item.layers for value in vars(layer).values()]
    held += [value for entry in held if isinstance(entry, dict) for value in entry.values()]
    return [value for value in held if isinstance(value, torch.Tensor)]
