"""A prefix at a moment: an immutable value that caches start from."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedConfig

from .exceptions import (
    LossyPrefixError,
    NotCroppableError,
    SnapshotIncompleteError,
    UnknownOptionError,
    UnknownStrategyError,
)
from .fingerprint import check_fingerprint
from .layers import LayerState
from .layers.quantized_state import quantization_error, scheme_of
from .quantization import QuantizationError
from .snapshot_file import load_snapshot, prepare_snapshot
from .storage import storage_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .caches import PrefixCache

__all__ = ["PrefixSnapshot", "register_cache"]

_caches: dict[str, Callable[..., PrefixCache]] = {}


def register_cache(strategy: str, build: Callable[..., PrefixCache]) -> None:
    """Say how `PrefixSnapshot.to_cache` makes a cache of ``strategy``."""
    _caches[strategy] = build


@dataclass(frozen=True, eq=False, repr=False)
class PrefixSnapshot:
    """A computed prefix. Whatever its cache does later, its bytes do not change.

    Attributes:
        layers: What each layer holds.
        seq_length: Tokens of the prefix.
        batch_size: Rows; a prefix that was prefilled has one.
        strategy: Name of the strategy that filled it.
        config: Configuration of the decoder that it belongs to.
        input_ids: Its token ids, int64 ``[batch, seq_length]`` on the CPU, or None where the cache was not told.
        next_logits: Logits after its last token, ``[batch, vocab]``, or None.
        fingerprint: Digest of the model that computed it, or None.
        padding_mask: Bool ``[batch, seq_length]``, False at padding; None where there is none.
        is_lossy: Whether the strategy keeps less than the model computed; `error` says by how much.

    Example:
        >>> import torch, hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
        >>> hpc.PrefixCachedModel(model).prefill(torch.tensor([[1, 2, 3]])).input_ids
        tensor([[1, 2, 3]])
    """

    layers: tuple[LayerState, ...]
    seq_length: int
    batch_size: int
    strategy: str
    config: PreTrainedConfig
    input_ids: torch.Tensor | None = None
    next_logits: torch.Tensor | None = None
    fingerprint: str | None = None
    padding_mask: torch.Tensor | None = None
    is_lossy: bool = False

    def __repr__(self) -> str:
        return (
            f"PrefixSnapshot({self.seq_length} tokens, batch_size={self.batch_size}, strategy={self.strategy!r}, "
            f"{self.nbytes / 1e6:.1f} MB)"
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Every tensor held: keys and values, next logits, token ids and padding mask."""
        told = (self.next_logits, self.input_ids, self.padding_mask)
        return [tensor for layer in self.layers for tensor in layer.tensors()] + [
            tensor for tensor in told if tensor is not None
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of tensor storage held, next logits included; storage held twice counts once."""
        return storage_bytes(self.tensors)

    @property
    def error(self) -> QuantizationError | None:
        """Relative error of each layer's keys and values, as measured when they were quantized; None if exact."""
        return quantization_error(self.layers) if self.is_lossy else None

    @property
    def lossy_key(self) -> str | None:
        """What prefixes it may be mixed with: those of the same way to quantize; None for exact ones."""
        if not self.is_lossy:
            return None
        scheme = scheme_of(self.layers)
        return self.strategy if scheme is None else f"{self.strategy}: {scheme.name}"

    def can_crop_to(self, length: int) -> bool:
        """Return whether `crop_to` works: a window that has moved on cannot go back by more than one token."""
        return all(layer.can_crop_to(length) for layer in self.layers)

    def crop_to(self, length: int) -> PrefixSnapshot:
        """Return a snapshot of the first ``length`` tokens. No copy; ``next_logits`` is then None.

        Args:
            length: Tokens to keep, from 0 to ``seq_length``.

        Raises:
            NotCroppableError: A layer no longer has what the shorter prefix needs.
        """
        if length == self.seq_length:
            return self
        if not self.can_crop_to(length):
            raise NotCroppableError(
                f"this snapshot of {self.seq_length} tokens cannot be cropped to {length}: "
                f"{_why_not(self.layers, length)}; take a snapshot at that length when it is computed"
            )
        return replace(
            self,
            layers=tuple(layer.crop_to(length) for layer in self.layers),
            seq_length=length,
            input_ids=None if self.input_ids is None else self.input_ids[:, :length],
            padding_mask=None if self.padding_mask is None else self.padding_mask[:, :length],
            next_logits=None,
        )

    def compact(self) -> PrefixSnapshot:
        """Return an equal snapshot with storage of its own and no spare room."""
        return replace(self, layers=tuple(layer.compact() for layer in self.layers))

    def to(self, device: torch.device | str) -> PrefixSnapshot:
        """Return the snapshot with its keys, values and logits on ``device``; token ids stay on the CPU."""
        return replace(
            self,
            layers=tuple(layer.to(device) for layer in self.layers),
            next_logits=None if self.next_logits is None else self.next_logits.to(device),
            padding_mask=None if self.padding_mask is None else self.padding_mask.to(device),
        )

    def to_cache(
        self, strategy: str | None = None, batch_size: int = 1, *, allow_lossy: bool = False, **options: Any
    ) -> PrefixCache:
        """Return a new cache that starts at this prefix.

        Args:
            strategy: Strategy of the cache; by default the one that filled the prefix.
            batch_size: Rows of the cache; a prefix of one row is shared by all of them.
            allow_lossy: Continue a lossy prefix in another strategy all the same.
            **options: Options of the cache class, such as ``max_cache_len`` of `PrefixStaticCache`; by default those
                that the prefix was quantized with.

        Raises:
            UnknownStrategyError: No cache of that name.
            UnknownOptionError: An option that the cache class does not have, or one that it needs is missing.
            LossyPrefixError: The prefix is lossy, the strategy another one, and ``allow_lossy`` was not given.
            BatchSizeError: The prefix has several rows and ``batch_size`` is another number.
            CacheCapacityError: The cache is too short for the prefix.

        Example:
            >>> import torch, hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
            >>> snapshot = hpc.PrefixCachedModel(model).prefill(torch.tensor([[1, 2, 3]]))
            >>> snapshot.to_cache("prefix-static", max_cache_len=8).get_seq_length().item()
            3
        """
        name = self.strategy if strategy is None else strategy
        if name not in _caches:
            raise UnknownStrategyError(f"strategy is {name!r}; a cache can be one of {', '.join(sorted(_caches))}")
        if self.is_lossy and name != self.strategy and not allow_lossy:
            raise LossyPrefixError(
                f"this prefix was filled by {self.strategy!r}, which is lossy; pass allow_lossy=True to continue it "
                f"in {name!r}"
            )
        scheme = scheme_of(self.layers)
        if name == self.strategy and scheme is not None:
            options = {**scheme.options, **options}
        _check_options(name, options)
        cache = _caches[name](config=self.config, **options)
        cache.load(self, batch_size=batch_size, allow_lossy=allow_lossy)
        return cache

    def verify(self, model: PreTrainedModel, *, allow_base: bool = False) -> None:
        """Raise unless ``model`` is the one, in the state, that computed this prefix.

        Args:
            model: The model that is to continue it.
            allow_base: Accept a prefix of its base model too, computed without its adapters. Right only where they
                act later than the prefix ends, as activated LoRA does.

        Raises:
            SnapshotIncompleteError: The snapshot was taken without ``model=``.
            FingerprintMismatchError: The model differs, or has changed since.
        """
        if self.fingerprint is None:
            raise SnapshotIncompleteError(
                "this snapshot does not know its model; take it with cache.snapshot(model=..., input_ids=...)"
            )
        check_fingerprint("this snapshot", self.fingerprint, model, allow_base=allow_base)

    def save(self, path: Path | str) -> None:
        """Write the snapshot to a file that any process can load, in the form of safetensors.

        The file is whole or not there: it is written beside ``path``, flushed to the disk, and then put in place of
        what was there.

        Args:
            path: The file.

        Raises:
            SnapshotIncompleteError: The snapshot lacks token ids or a fingerprint.

        Example:
            >>> import tempfile, torch, hf_prefix_cache as hpc
            >>> from transformers import LlamaConfig, LlamaForCausalLM
            >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
            >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
            >>> snapshot = hpc.PrefixCachedModel(model).prefill(torch.tensor([[1, 2, 3]]))
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     snapshot.save(f"{folder}/rules.safetensors")
            ...     hpc.PrefixSnapshot.load(f"{folder}/rules.safetensors", model=model).input_ids
            tensor([[1, 2, 3]])
        """
        prepare_snapshot(self).write(Path(path))

    @staticmethod
    def load(
        path: Path | str, *, model: PreTrainedModel | None, unverified: bool = False, allow_base: bool = False
    ) -> PrefixSnapshot:
        """Return the snapshot in a file, after everything in it was checked.

        On the CPU its tensors are the mapped file: they are read when they are used, and shared with other processes
        that load it. The file may be replaced or removed meanwhile, but not written into.

        Args:
            path: A file that `save` wrote.
            model: The model that is to continue it; must be the one, in the state, that computed it.
            unverified: Load it all the same: with None for ``model``, or for a model with another fingerprint.
            allow_base: Accept a prefix of the model's base, computed without its adapters; see `verify`.

        Raises:
            SnapshotFileError: The file is cut off, damaged, of an unknown version or not one at all.
            FingerprintMismatchError: Another model computed it, or the model has changed since.
            InputMismatchError: No model and not ``unverified``, or a model of another architecture.
            OSError: The file cannot be opened.
        """
        return load_snapshot(path, model=model, unverified=unverified, allow_base=allow_base)


def _check_options(strategy: str, options: dict[str, Any]) -> None:
    known = {
        name: parameter
        for name, parameter in inspect.signature(_caches[strategy]).parameters.items()
        if name != "config"
    }
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise UnknownOptionError(
            f"{strategy!r} has no option {', '.join(unknown)}; its options are {', '.join(known) or 'none'}"
        )
    missing = [name for name in known if known[name].default is inspect.Parameter.empty and name not in options]
    if missing:
        raise UnknownOptionError(f"{strategy!r} needs the option {', '.join(missing)}; pass it to to_cache")


def _why_not(layers: tuple[LayerState, ...], length: int) -> str:
    if not 0 <= length <= layers[0].length:
        return f"the length must be from 0 to {layers[0].length}"
    index, layer = next((i, layer) for i, layer in enumerate(layers) if not layer.can_crop_to(length))
    return f"layer {index} has {layer.kept}"
