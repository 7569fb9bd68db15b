"""Inputs for raw ``forward`` calls on padded rows, and the memory of which cached tokens are padding."""

from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ..architectures import positions_follow_mask, positions_from_padding_id
from ..exceptions import InputMismatchError, UnsupportedModelError
from ..layers import PrefixRecurrentLayer
from ..validation import check_mask, check_token_ids

__all__ = ["PaddingAwareCache", "PreparedInputs"]


class PreparedInputs(NamedTuple):
    """What a raw ``forward`` call on padded rows needs beside the token ids.

    Attributes:
        input_ids: The new tokens, int64 ``[rows, new]``.
        position_ids: Their positions, counted over tokens and not over padding, int64 ``[rows, new]``, from where the
            model begins.
        attention_mask: 1 for tokens and 0 for padding, int64 ``[rows, cached + new]``; on static caches without
            running states 0 up to their last place, ``[rows, max_cache_len]``.

    Example:
        >>> import torch, hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig
        >>> cache = hpc.PrefixDynamicCache(config=LlamaConfig(num_hidden_layers=2))
        >>> inputs = cache.prepare_inputs(torch.tensor([[0, 7], [8, 9]]), torch.tensor([[0, 1], [1, 1]]))
        >>> inputs.position_ids.tolist()
        [[0, 0], [0, 1]]
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    attention_mask: torch.Tensor


class PaddingAwareCache(Cache):
    """A cache that remembers padding: models count positions from its length alone, which is wrong for padded rows."""

    layers: list[Any]  # of this package: see hf_prefix_cache.layers
    known_ids: torch.Tensor | None
    _config: PreTrainedConfig
    _padding: torch.Tensor | None = None  # bool [rows, n], False at padding; what is beyond n are tokens

    @property
    def seq_length(self) -> int:
        """Tokens held, padding included, as a plain int."""
        length: int = self._leading_layer.seen()
        return length

    @property
    def _leading_layer(self) -> Any:
        """The layer that knows length and rows best: the first that holds keys, else the first."""
        return next((layer for layer in self.layers if layer.holds_keys), self.layers[0])

    @property
    def padding_mask(self) -> torch.Tensor | None:
        """Bool ``[rows, seq_length]``, False at padding, as far as the cache was told; None where there is none."""
        if self._padding is None:
            return None
        length = self.seq_length
        mask = self._padding[:, :length]
        if mask.shape[1] < length:  # tokens that came without `prepare_inputs` are not padding
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], length - mask.shape[1])], dim=1)
        return None if bool(mask.all()) else mask

    def prepare_inputs(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> PreparedInputs:
        """Return what a raw ``forward`` on this cache needs for ``input_ids``, padded on either side.

        Padding of earlier calls is remembered, and padding counts as cached: it takes room.

        Args:
            input_ids: The new tokens, ``[rows, new]``.
            attention_mask: 1 for tokens and 0 for padding, ``[rows, new]`` or, cached tokens included,
                ``[rows, cached + new]``; None where nothing is padded.

        Raises:
            InvalidTokensError: Ids that are empty, not integers or out of the vocabulary.
            InputMismatchError: A mask of another shape, one that calls a cached token padding, or a row without any
                token.
            BatchSizeError: Other rows than the cache holds.
            CacheCapacityError: A static cache has no room for them.
            UnsupportedModelError: Padded rows on a model with windows, where padding between prefix and suffix is
                wrong by nature, or on one whose positions cannot be set; the padding id among the tokens of a model
                that counts positions from behind it (RoBERTa and its like).

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from hf_prefix_cache.compat import cache_argument
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
            >>> cache = hpc.PrefixDynamicCache(config=model.config)
            >>> _ = model(torch.tensor([[1, 2, 3]]), **cache_argument(cache))
            >>> batch = cache.fork(batch_size=2)
            >>> suffixes, mask = torch.tensor([[4, 5], [6, 0]]), torch.tensor([[1, 1], [1, 0]])
            >>> inputs = batch.prepare_inputs(suffixes, mask)._asdict()
            >>> model(**inputs, **cache_argument(batch)).logits.shape
            torch.Size([2, 2, 32])
        """
        ids = check_token_ids(input_ids, config=self._config)
        rows, new = ids.shape
        cached = self.seq_length
        for layer in self.layers:
            layer.check_rows(rows)
            layer.check_room(new)
        if attention_mask is None:
            mask = torch.ones(rows, cached + new, dtype=torch.bool, device=ids.device)
        else:
            mask = check_mask(attention_mask, rows=rows, cached=cached, new=new).to(ids.device)
        mask = torch.cat([self._cached_mask(mask[:, :cached]), mask[:, cached:]], dim=1)
        is_padded = not bool(mask.all())
        if is_padded:
            self._check_padding(mask)
        self._padding = mask if is_padded else None
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0) + self._first_position(ids)
        return PreparedInputs(ids, positions[:, cached:], self._full_mask(mask.long()))

    def _cached_mask(self, claimed: torch.Tensor) -> torch.Tensor:
        """Return what is remembered of the cached tokens, ``[rows, cached]``, if ``claimed`` can be true beside it."""
        known = self.padding_mask
        held = torch.ones_like(claimed) if known is None else known.to(claimed.device)
        denied = (held & ~claimed).nonzero()
        if len(denied):
            row, column = denied[0].tolist()
            raise InputMismatchError(
                f"attention_mask is 0 at the cached token {column} of row {row}, but the cache was filled with it as "
                "a token and not as padding; pass the mask when the padded tokens are fed, through prepare_inputs"
            )
        return held

    def _first_position(self, ids: torch.Tensor) -> int:
        """Return the position of a row's first token: not 0 where models count from behind their padding id."""
        if not positions_from_padding_id(self._config):
            return 0
        padding_id = int(self._config.pad_token_id)
        known = [ids] if self.known_ids is None else [ids, self.known_ids]
        if any(bool((part == padding_id).any()) for part in known):
            raise UnsupportedModelError(
                f"input_ids or the cached tokens contain the padding id {padding_id}, which models of the type "
                f"{self._config.model_type!r} do not count as a token; leave it out"
            )
        return padding_id + 1

    def _check_padding(self, mask: torch.Tensor) -> None:
        empty = (~mask.any(dim=1)).nonzero()
        if len(empty):
            raise InputMismatchError(
                f"attention_mask leaves row {int(empty[0])} without any token; leave that row out of the batch"
            )
        if not all(layer.is_sliceable for layer in self.layers):
            raise UnsupportedModelError(
                "padded rows on a model with windows or a running state: padding between prefix and suffix shifts "
                "the windows and enters the state; run rows of equal length, or use PrefixCachedModel.forward, "
                "which groups them"
            )
        if not positions_follow_mask(self._config):
            raise UnsupportedModelError(
                f"padded rows on a model of the type {self._config.model_type!r}, which takes no position_ids that "
                "could skip padding; run rows of equal length, or use PrefixCachedModel.forward, which groups them"
            )

    def _full_mask(self, mask: torch.Tensor) -> torch.Tensor:
        if any(isinstance(layer, PrefixRecurrentLayer) for layer in self.layers):
            return mask  # running states take its last columns for the new tokens
        # ALiBi models make biases as long as the mask: they must be as long as the keys, all of a static buffer.
        keys = max(mask.shape[1], self.get_max_length())
        return torch.nn.functional.pad(mask, (0, keys - mask.shape[1]))

    def _select_padding(self, rows: torch.Tensor) -> None:
        if self._padding is not None:
            self._padding = self._padding.index_select(0, rows.to(self._padding.device))

    def _crop_padding(self, length: int) -> None:
        if self._padding is not None:
            self._padding = self._padding[:, :length]
