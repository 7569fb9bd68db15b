"""What all prefix caches can do beyond Transformers' caches: snapshot, restore, fork, crop and padded inputs."""

from typing import Any, NamedTuple, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from ..compat import LayerSpec, decoder_config, layer_specs
from ..exceptions import (
    BatchSizeError,
    FingerprintMismatchError,
    InputMismatchError,
    NotCroppableError,
    UnsupportedLayerError,
    UnsupportedModelError,
)
from ..fingerprint import fingerprint_of
from ..snapshot import PrefixSnapshot
from ..storage import storage_bytes
from ..validation import check_mask, check_token_ids, vocabulary_size

__all__ = ["PreparedInputs", "PrefixCache", "attention_layers", "total_nbytes"]

_Self = TypeVar("_Self", bound="PrefixCache")
_WINDOWED = ("sliding_attention", "chunked_attention")


class PreparedInputs(NamedTuple):
    """What a raw ``forward`` call on padded rows needs beside the token ids.

    Attributes:
        input_ids: The new tokens, int64 ``[rows, new]``.
        position_ids: Their positions, counted over tokens and not over padding, int64 ``[rows, new]``.
        attention_mask: 1 for tokens and 0 for padding, cached part included, int64 ``[rows, cached + new]``.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor


def attention_layers(config: PreTrainedConfig, cache_name: str) -> list[LayerSpec]:
    """Return what each layer of ``config`` keeps, if it is a kind that prefix caches hold exactly.

    Raises:
        UnsupportedLayerError: Another kind.
    """
    specs = layer_specs(config)
    for index, spec in enumerate(specs):
        if spec.kind != "full_attention" and spec.kind not in _WINDOWED:
            raise UnsupportedLayerError(
                f"layer {index} of {type(config).__name__} is of the kind {spec.kind!r}, which {cache_name} does not "
                "hold; it holds full, sliding and chunked attention: use Transformers' own cache for this model"
            )
    return specs


class PrefixCache(Cache):
    """Base of all prefix caches; see `PrefixDynamicCache` and `PrefixStaticCache`."""

    strategy: str
    _config: PreTrainedConfig
    _options: dict[str, Any]
    _padding: torch.Tensor | None = None
    _known_ids: torch.Tensor | None = None

    # -- what is held ------------------------------------------------------------------------------------------------

    @property
    def seq_length(self) -> int:
        """Tokens held, padding included, as a plain int."""
        return int(self.get_seq_length())

    @property
    def rows(self) -> int | None:
        """Rows of the batch, or None while nothing is held."""
        rows: int | None = self.layers[0].rows
        return rows

    @property
    def nbytes(self) -> int:
        """Bytes of tensor storage held, spare room included; storage shared between layers counts once."""
        return storage_bytes(tensor for layer in self.layers for tensor in layer.tensors())

    @property
    def known_ids(self) -> torch.Tensor | None:
        """Token ids ``[rows or 1, n]`` of the first tokens held, as far as the cache was told; else None."""
        if self._known_ids is None:
            return None
        return self._known_ids[:, : self.seq_length]

    # -- snapshot, restore, fork -------------------------------------------------------------------------------------

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
            >>> import hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
            >>> cache = hpc.PrefixDynamicCache(config=model.config)
            >>> _ = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
            >>> cache.snapshot().seq_length
            3
        """
        length, rows = self.seq_length, self.rows
        if not length or rows is None:
            raise InputMismatchError("the cache is empty; run a forward with it before taking a snapshot")
        if model is not None and decoder_config(model.config).to_dict() != self._config.to_dict():
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
            layers=tuple(layer.share().detach() for layer in self.layers),
            seq_length=length,
            batch_size=rows,
            strategy=self.strategy,
            config=self._config,
            input_ids=input_ids,
            next_logits=next_logits,
            fingerprint=None if model is None else fingerprint_of(model),
            padding_mask=self._held_padding(),
        )

    def restore(self, snapshot: PrefixSnapshot) -> None:
        """Put this cache at ``snapshot``, in place; a static cache keeps its tensors' addresses.

        Raises:
            InputMismatchError: The snapshot belongs to another architecture.
            BatchSizeError, CacheCapacityError: The snapshot does not fit a static cache.
        """
        self.load(snapshot, batch_size=snapshot.batch_size)

    def load(self, snapshot: PrefixSnapshot, *, batch_size: int) -> None:
        """Put this cache at ``snapshot`` with ``batch_size`` rows, in place.

        Raises:
            InputMismatchError: The snapshot belongs to another architecture.
            BatchSizeError, CacheCapacityError: It does not fit.
        """
        self._check_batch_size(batch_size, snapshot.batch_size)
        kept, own = [layer.window for layer in snapshot.layers], [layer.window for layer in self.layers]
        if kept != own:
            raise InputMismatchError(
                f"the snapshot has {len(kept)} layers with windows {sorted(set(map(str, kept)))}, this cache has "
                f"{len(own)} with {sorted(set(map(str, own)))}: they belong to different models"
            )
        for layer, state in zip(self.layers, snapshot.layers, strict=True):
            layer.check_load(state, batch_size)
        for layer, state in zip(self.layers, snapshot.layers, strict=True):
            layer.load(state, batch_size)
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
        forked = type(self)(config=self._config, **self._options)
        rows = self.rows
        if rows is None:
            return forked
        wanted = rows if batch_size is None else batch_size
        self._check_batch_size(wanted, rows)
        for layer, own in zip(forked.layers, self.layers, strict=True):
            layer.load(own.share(), wanted)
        padding = self._held_padding()
        forked._padding = None if padding is None else padding.expand(wanted, -1)
        forked._known_ids = self.known_ids
        return forked

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        return self.fork()

    # -- crop --------------------------------------------------------------------------------------------------------

    def can_crop_to(self, length: int) -> bool:
        """Return whether `crop_to` works."""
        return 0 <= length <= self.seq_length and all(layer.can_crop_to(length) for layer in self.layers)

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens.

        Raises:
            NotCroppableError: More tokens than are held, or a window has moved on; nothing was changed.
        """
        if not self.can_crop_to(length):
            held = self.seq_length
            reason = (
                f"it holds {held} tokens"
                if not 0 <= length <= held
                else "a window has moved on and no longer holds the tokens before it"
            )
            raise NotCroppableError(
                f"the cache cannot be cropped to {length} tokens: {reason}; restore a snapshot taken at that length, "
                "or call activate_past_recording before the tokens to undo are added"
            )
        for layer in self.layers:
            layer.crop_to(length)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` tokens (Transformers' rule: the argument is 0 or negative).

        With past recording on, this also forgets what windows no longer need, also for 0.

        Raises:
            ValueError: The argument is positive.
            NotCroppableError: More tokens than are held, or a window has moved on; nothing was changed.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop was called with {tokens_to_remove}; it takes 0 or the negative number of tokens to remove: use "
                f"crop_to({tokens_to_remove}) to keep the first {tokens_to_remove}"
            )
        self.crop_to(self.seq_length + tokens_to_remove)

    # -- raw forward calls on padded rows ----------------------------------------------------------------------------

    def prepare_inputs(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> PreparedInputs:
        """Return what a raw ``forward`` on this cache needs for ``input_ids``, padded on either side.

        Models count positions from the length of the cache alone, which is wrong for padded rows. Padding of earlier
        calls is remembered.

        Args:
            input_ids: The new tokens, ``[rows, new]``.
            attention_mask: 1 for tokens and 0 for padding, ``[rows, new]`` or, cached tokens included,
                ``[rows, cached + new]``; None where nothing is padded.

        Raises:
            InvalidTokensError: Ids that are empty, not integers or out of the vocabulary.
            InputMismatchError: A mask of another shape.
            BatchSizeError: Other rows than the cache holds.
            CacheCapacityError: A static cache has no room for them.
            UnsupportedModelError: Padded rows on a model with windows, where padding between prefix and suffix is
                wrong by nature.

        Example:
            >>> import hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
            >>> cache = hpc.PrefixDynamicCache(config=model.config)
            >>> _ = model(torch.tensor([[1, 2, 3]]), past_key_values=cache)
            >>> batch = cache.fork(batch_size=2)
            >>> suffixes, mask = torch.tensor([[4, 5], [6, 0]]), torch.tensor([[1, 1], [1, 0]])
            >>> model(**batch.prepare_inputs(suffixes, mask)._asdict(), past_key_values=batch).logits.shape
            torch.Size([2, 2, 32])
        """
        ids = check_token_ids(input_ids, config=self._config)
        rows, new = ids.shape
        cached = self.seq_length
        for layer in self.layers:
            layer.check_rows(rows)
            layer.check_room(new)
        earlier = self._held_padding()
        if attention_mask is None:
            mask = torch.ones(rows, cached + new, dtype=torch.bool, device=ids.device)
        else:
            mask = check_mask(attention_mask, rows=rows, cached=cached, new=new).to(ids.device)
        if earlier is not None:
            mask = torch.cat([earlier.to(mask.device) & mask[:, :cached], mask[:, cached:]], dim=1)
        if not bool(mask.all()):
            if any(layer.window is not None for layer in self.layers):
                raise UnsupportedModelError(
                    "padded rows on a model with sliding or chunked windows: padding between prefix and suffix shifts "
                    "the windows; run rows of equal length, or use PrefixCachedModel.forward, which groups them"
                )
            self._padding = mask
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return PreparedInputs(ids, positions[:, cached:], mask.long())

    # -- rows --------------------------------------------------------------------------------------------------------

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was; a prefix that all rows share is not touched."""
        self._check_rows_exist(beam_idx)
        super().reorder_cache(beam_idx)
        self._select_told(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times in place of itself."""
        rows = self.rows
        super().batch_repeat_interleave(repeats)
        if rows is not None:
            self._select_told(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that ``indices`` (positions or a boolean mask) names, in that order."""
        rows = self.rows
        if rows is None:
            return
        self._check_rows_exist(torch.arange(rows)[indices.cpu()])
        super().batch_select_indices(indices)
        self._select_told(torch.arange(rows)[indices.cpu()])

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self._padding = self._known_ids = None

    # -- inside ------------------------------------------------------------------------------------------------------

    def _held_padding(self) -> torch.Tensor | None:
        """Return the mask of the tokens held, ``[rows, seq_length]``; None where nothing is padding."""
        if self._padding is None:
            return None
        length = self.seq_length
        mask = self._padding[:, :length]
        if mask.shape[1] < length:  # tokens that came without `prepare_inputs` are not padding
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], length - mask.shape[1])], dim=1)
        return None if bool(mask.all()) else mask

    def _select_told(self, rows: torch.Tensor) -> None:
        if self._padding is not None:
            self._padding = self._padding.index_select(0, rows.to(self._padding.device))
        if self._known_ids is not None and self._known_ids.shape[0] > 1:
            self._known_ids = self._known_ids.index_select(0, rows.cpu())

    def _check_rows_exist(self, rows: torch.Tensor) -> None:
        held = self.rows
        if held is not None and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < held:
            raise BatchSizeError(f"rows {rows.tolist()} were asked for but the cache holds {held}")

    @staticmethod
    def _check_batch_size(wanted: int, held: int) -> None:
        if wanted < 1 or held not in (1, wanted):
            raise BatchSizeError(
                f"batch_size is {wanted} but {held} rows are held; a batch of 1 can be expanded to any number, "
                "another one keeps its rows"
            )


def total_nbytes(caches: Any) -> int:
    """Return the bytes of tensor storage held by ``caches`` together; storage shared between them counts once.

    Args:
        caches: Any iterable of prefix caches and snapshots.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> hpc.total_nbytes([])
        0
    """
    tensors: list[torch.Tensor] = []
    for item in caches:
        if isinstance(item, PrefixSnapshot):
            tensors += item.tensors
        else:
            tensors += [tensor for layer in item.layers for tensor in layer.tensors()]
    return storage_bytes(tensors)
