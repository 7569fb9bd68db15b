"""Layer kinds of modeling files, kept whole: every tensor and number that such a layer holds is its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from ..exceptions import BatchSizeError, UnsupportedLayerError

__all__ = ["KeptKind", "KeptLayer", "KeptState", "kept_layer"]

_PLAIN = (int, float, bool, str, torch.dtype, torch.device, type(None))


@dataclass(frozen=True)
class KeptKind:
    """What has to be known of a layer class to capture, restore, fork and crop it.

    Attributes:
        batch_dims: For attributes whose rows are not along the first dimension, that dimension; None for tensors that
            all rows share.
        token_dims: For each attribute with one entry per token, the dimension of the tokens. With it the layer can be
            cropped, and then every tensor must be named: what grows with tokens here, and what does not with None.
            Without it, a state can be continued from its end only.
        counters: Attributes that count tokens, as plain ints: set when the layer is cropped.
        writes_in_place: Whether the layer writes into tensors that it holds, so that capturing copies them.

    Example:
        >>> KeptKind(token_dims={"keys": -2, "values": -2}).is_croppable
        True
    """

    batch_dims: Mapping[str, int | None] = field(default_factory=dict)
    token_dims: Mapping[str, int | None] | None = None
    counters: tuple[str, ...] = ()
    writes_in_place: bool = True

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return self.token_dims is not None


@dataclass(frozen=True, eq=False)
class KeptState:
    """Everything that one layer held after ``length`` tokens.

    Attributes:
        values: By attribute, tensors, plain values, and dictionaries of both.
        length: Tokens seen.
        rows: Rows held.
        kind: What is known of the layer's class.
        window: Width of its window, or None.
    """

    values: Mapping[str, Any]
    length: int
    rows: int
    kind: KeptKind
    window: int | None = None

    is_sliceable = False  # for the store: its tokens are not runs of keys and values

    @property
    def kept(self) -> str:
        """What is held, in words."""
        return "a state of its own kind, which exists only after the last token"

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor held."""
        for value in self.values.values():
            for entry in value.values() if isinstance(value, dict) else (value,):
                if isinstance(entry, torch.Tensor):
                    yield entry

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept."""
        return length in (0, self.length) or (self.kind.is_croppable and 0 < length < self.length)

    def crop_to(self, length: int) -> KeptState:
        """Return the state after the first ``length`` tokens. Ask `can_crop_to` before."""
        if length == self.length:
            return self
        if not length:
            return replace(self, values={}, length=0, rows=1)
        dims = self.kind.token_dims or {}

        def cut(name: str, tensor: torch.Tensor) -> torch.Tensor:
            dim = dims.get(name)
            return tensor if dim is None else tensor.narrow(dim, 0, length)

        values = {**self._map(cut), **dict.fromkeys(self.kind.counters, length)}
        return replace(self, values=values, length=length)

    def compact(self) -> KeptState:
        """Return the same state in storage of its own."""
        return replace(
            self, values=self._map(lambda name, tensor: tensor.clone(memory_format=torch.contiguous_format))
        )

    def detach(self) -> KeptState:
        """Return the same storage without the autograd graph."""
        return replace(self, values=self._map(lambda name, tensor: tensor.detach()))

    def select(self, rows: torch.Tensor) -> KeptState:
        """Return copies of ``rows``, an index tensor of shape ``[n]``."""

        def chosen(name: str, tensor: torch.Tensor) -> torch.Tensor:
            dim = self._batch_dim(name, tensor)
            return tensor if dim is None else tensor.index_select(dim, rows.to(tensor.device))

        return replace(self, values=self._map(chosen), rows=len(rows))

    def row(self, index: int, start: int, stop: int) -> KeptState:
        """Return row ``index``; the tokens from ``start`` to ``stop`` (its padding) never entered the state."""
        one = self.select(torch.tensor([min(index, self.rows - 1)]))
        return replace(one, length=self.length - (stop - start))

    def expand(self, rows: int) -> KeptState:
        """Return the state for a batch of ``rows``, of which this one has one or as many."""
        return self if rows == self.rows else self.select(torch.zeros(rows, dtype=torch.long))

    def to(self, device: torch.device | str) -> KeptState:
        """Return the state with its tensors on ``device``."""
        return replace(self, values=self._map(lambda name, tensor: tensor.to(device)))

    def _batch_dim(self, name: str, tensor: torch.Tensor) -> int | None:
        # Tensors without rows are constants, or what lazily made layers start from.
        dim = self.kind.batch_dims.get(name, 0)
        return None if dim is None or tensor.ndim <= dim or tensor.shape[dim] != self.rows else dim

    def _map(self, function: Callable[[str, torch.Tensor], torch.Tensor]) -> dict[str, Any]:
        """Return the values with ``function`` applied to each tensor; one that two attributes hold stays one."""
        known: dict[int, torch.Tensor] = {}

        def mapped(name: str, value: Any) -> Any:
            if isinstance(value, dict):
                return {key: mapped(name, entry) for key, entry in value.items()}
            if not isinstance(value, torch.Tensor):
                return value
            if id(value) not in known:
                known[id(value)] = function(name, value)
            return known[id(value)]

        return {name: mapped(name, value) for name, value in self.values.items()}


class KeptLayer:
    """Makes a prefix layer of the layer class that stands behind it in the order of classes.

    What the class does while a forward runs is its own; everything else is done on the whole of what it holds.
    """

    kind: KeptKind
    holds_keys = True
    is_sliceable = False
    is_compileable = False
    defers = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._constants = dict(vars(self))
        self._empty = self._values()

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be taken back."""
        return self.kind.is_croppable

    @property
    def window(self) -> int | None:
        """Width of its window, or None."""
        return getattr(self, "sliding_window", None)

    @property
    def rows(self) -> int | None:
        """Rows of the batch, or None while nothing is held."""
        if not self.seen():
            return None
        for name, value in self._values().items():
            dim = self.kind.batch_dims.get(name, 0)
            for tensor in value.values() if isinstance(value, dict) else (value,):
                if dim is not None and isinstance(tensor, torch.Tensor) and tensor.ndim > 1 and tensor.numel():
                    return int(tensor.shape[dim])
        return None

    def seen(self) -> int:
        """Return the tokens seen, as a plain int."""
        return int(self.get_seq_length())  # type: ignore[attr-defined]

    def check_rows(self, rows: int) -> None:
        """Raise `BatchSizeError` unless a batch of ``rows`` continues what is held."""
        held = self.rows
        if held is not None and rows != held:
            raise BatchSizeError(
                f"the batch has {rows} rows but the cache holds {held}; fork the cache with batch_size={rows}, or "
                "select rows with batch_select_indices"
            )

    def update(self, key_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Add the tokens of a forward, as the layer's own class does.

        Raises:
            BatchSizeError: The rows differ from those held.
        """
        self.check_rows(key_states.shape[0])
        return super().update(key_states, *args, **kwargs)  # type: ignore[misc]

    def check_room(self, added: int) -> None:
        """Accept any number of further tokens."""

    def check_load(self, state: KeptState, rows: int) -> None:
        """Accept any state."""

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor held."""
        return list(self.state().tensors()) if self.seen() else []

    def state(self) -> KeptState:
        """Return what is held, uncopied: for questions, not for keeping."""
        length = self.seen()
        return KeptState(self._values() if length else {}, length, self.rows or 1, self.kind, self.window)

    def share(self) -> KeptState:
        """Return what is held; no later operation of this layer changes its bytes."""
        state = self.state()
        return replace(state, values=state._map(lambda name, tensor: tensor.clone())) if self._copies else state

    def load(self, state: KeptState, rows: int) -> None:
        """Hold ``state`` for a batch of ``rows``."""
        if not state.length:
            self.reset()
            return
        loaded = state.expand(rows)
        copies = self._copies and loaded is state
        self._hold(loaded._map(lambda name, tensor: tensor.clone() if copies else tensor))

    def can_crop_to(self, length: int) -> bool:
        """Return whether the first ``length`` tokens can be kept exactly."""
        return self.state().can_crop_to(length)

    def crop_to(self, length: int) -> None:
        """Keep the first ``length`` tokens. Ask `can_crop_to` before."""
        self.load(self.state().crop_to(length), self.rows or 1)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens; `can_crop_to` says whether that is possible."""
        self.crop_to(max(0, self.seen() + tokens_to_remove))

    def reset(self) -> None:
        """Forget everything."""
        empty = KeptState(self._empty, 0, 1, self.kind)
        self._hold(empty._map(lambda name, tensor: tensor.clone()))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row ``i`` what row ``beam_idx[i]`` was."""
        if self.rows is not None:
            self._hold(dict(self.state().select(beam_idx).values))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times in place of itself."""
        rows = self.rows
        if rows is not None:
            self.reorder_cache(torch.arange(rows).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows that ``indices`` (positions or a boolean mask) names, in that order."""
        rows = self.rows
        if rows is not None:
            self.reorder_cache(torch.arange(rows)[indices.cpu()])

    def unshare(self) -> None:
        """Do nothing: what is shared is never written."""

    @property
    def _copies(self) -> bool:
        return self.kind.writes_in_place

    def _values(self) -> dict[str, Any]:
        """Return every attribute that can change.

        Raises:
            UnsupportedLayerError: One holds something that cannot be captured.
        """
        values: dict[str, Any] = {}
        for name, value in vars(self).items():
            if name in ("_constants", "_empty"):
                continue
            entries = value.values() if isinstance(value, dict) else (value,)
            if all(isinstance(entry, (torch.Tensor, *_PLAIN)) for entry in entries):
                values[name] = dict(value) if isinstance(value, dict) else value
            elif name not in self._constants or self._constants[name] is not value:
                raise UnsupportedLayerError(
                    f"{name} of {type(self).__mro__[2].__name__} holds a {type(value).__name__}, which cannot be "
                    "captured; keep tensors, plain values, or dictionaries of them there"
                )
        return values

    def _hold(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, dict(value) if isinstance(value, dict) else value)


def kept_layer(layer_class: type, kind: KeptKind, options: Mapping[str, Any]) -> Any:
    """Return an empty prefix layer of ``layer_class``, a layer class of Transformers or of a modeling file.

    Raises:
        UnsupportedLayerError: The class does not count its tokens, as Transformers' `CacheLayerMixin` does.
    """
    if not issubclass(layer_class, CacheLayerMixin):
        raise UnsupportedLayerError(
            f"{layer_class.__name__} is no subclass of Transformers' CacheLayerMixin, so it does not tell how many "
            "tokens it holds; derive it from that class or from one of its subclasses"
        )
    # Without a layer type of its own, so that Transformers does not take it for the class of that type.
    made: Any = type(f"Prefix{layer_class.__name__}", (KeptLayer, layer_class), {"kind": kind, "_layer_type": None})
    return made(**options)
