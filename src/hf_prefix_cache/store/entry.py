"""What of a snapshot a store keeps, checked before anything is touched."""

from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch

from ..exceptions import BatchSizeError, InputMismatchError, SnapshotIncompleteError
from ..layers import AttentionState, LayerState
from ..snapshot import PrefixSnapshot
from ..validation import check_token_ids
from .page import tensor_bytes
from .tokens import encode_tokens

__all__ = ["Entry", "Key", "LayerLayout", "Layout", "is_on"]


class LayerLayout(NamedTuple):
    """What the same layer has in common in all entries of one tree.

    Beside the key, since a model may move to another device or run under autocast, and one prefix must not hold
    tensors of both kinds.

    Attributes:
        is_sliceable: Whether any run of its tokens can be kept on its own.
        window: Its window.
        placed: Dtypes and devices of its tensors.
    """

    is_sliceable: bool
    window: int | None
    placed: frozenset[tuple[torch.dtype, torch.device]]


Layout = tuple[LayerLayout, ...]


class Key(NamedTuple):
    """Prefixes of different keys are never mixed.

    Attributes:
        fingerprint: Of the model in the state that computed them.
        namespace: Their tenant.
        lossy_strategy: The strategy of lossy prefixes and how it quantizes; None for exact ones, whatever filled them.
        home: How prefixes were laid out that now are elsewhere, and where they go back to; None for those at home.
    """

    fingerprint: str
    namespace: str
    lossy_strategy: str | None
    home: Layout | None = None

    @classmethod
    def of(cls, snapshot: PrefixSnapshot, namespace: str) -> "Key":
        """Return the key of ``snapshot`` for the tenant ``namespace``."""
        return cls(str(snapshot.fingerprint), namespace, snapshot.lossy_key)

    def from_home(self, home: Layout) -> "Key":
        """Return the key of prefixes that come from ``home``."""
        return self._replace(home=home)

    def anywhere(self) -> "Key":
        """Return the key without a home."""
        return self._replace(home=None)

    def is_for(self, device: torch.device | None) -> bool:
        """Return whether prefixes of this key go back to ``device``; any will do where it is None."""
        return device is None or self.home is None or is_on(self.home, device)


def is_on(layout: Layout, device: torch.device) -> bool:
    """Return whether something of ``layout`` is on ``device``, or nothing is anywhere."""
    places = {place for layer in layout for _, place in layer.placed}
    return not places or any(place.type == device.type and place.index in (device.index, None) for place in places)


@dataclass(frozen=True, eq=False)
class Entry:
    """A snapshot as the store sees it.

    Attributes:
        length: Number of tokens.
        tokens: Their ids as bytes.
        sliceable: The layers of which any run of tokens can be kept on its own.
        others: The other layers (windows, running states): what they hold is of use near the snapshot's end only.
        next_logits: Logits after the last token, ``[1, vocab]``, or None.
        token_bytes: Bytes of one token in the sliceable layers.
        end_bytes: Bytes of the other layers.
        layout: What all entries of one tree have in common.
    """

    length: int
    tokens: bytes
    sliceable: tuple[AttentionState, ...]
    others: tuple[LayerState, ...]
    next_logits: torch.Tensor | None
    token_bytes: int
    end_bytes: int
    layout: Layout

    @property
    def logits_bytes(self) -> int:
        """Bytes of the next logits."""
        return 0 if self.next_logits is None else tensor_bytes([self.next_logits])

    @property
    def nbytes(self) -> int:
        """Bytes that the entry takes in a store that shares none of its tokens."""
        return self.length * self.token_bytes + self.end_bytes + self.logits_bytes

    @classmethod
    def of(cls, snapshot: PrefixSnapshot) -> "Entry":
        """Return the entry of ``snapshot``; nothing is copied yet.

        Raises:
            SnapshotIncompleteError: It lacks token ids or a fingerprint, or has padding.
            BatchSizeError: It has several rows.
            InputMismatchError: Its token ids or layers do not fit its length.
        """
        if snapshot.batch_size != 1:
            raise BatchSizeError(
                f"the snapshot has {snapshot.batch_size} rows; a store keeps single rows: take one of each row"
            )
        if snapshot.input_ids is None or snapshot.fingerprint is None:
            missing = "input_ids" if snapshot.input_ids is None else "fingerprint"
            raise SnapshotIncompleteError(
                f"the snapshot has no {missing}, without which it cannot be found again; take it with "
                "cache.snapshot(model=..., input_ids=...)"
            )
        if snapshot.padding_mask is not None:
            raise SnapshotIncompleteError(
                "the snapshot has padding, which no other prompt shares; take it of the row without padding"
            )
        ids = check_token_ids(snapshot.input_ids, config=snapshot.config)
        if ids.shape != (1, snapshot.seq_length):
            raise InputMismatchError(
                f"the snapshot's input_ids have shape {list(ids.shape)} but it holds {snapshot.seq_length} tokens"
            )
        for index, layer in enumerate(snapshot.layers):
            if layer.length != snapshot.seq_length or layer.rows != 1 or not layer.can_crop_to(layer.length):
                raise InputMismatchError(
                    f"layer {index} holds {layer.rows} rows after {layer.length} tokens, or lacks some that the next "
                    f"one attends to; it must hold what follows from {snapshot.seq_length} tokens, in one row"
                )
        sliceable = tuple(layer for layer in snapshot.layers if _is_sliceable(layer))
        others = tuple(layer for layer in snapshot.layers if not _is_sliceable(layer))
        logits = snapshot.next_logits
        return cls(
            length=snapshot.seq_length,
            tokens=encode_tokens(ids[0]),
            sliceable=sliceable,
            others=others,
            next_logits=None if logits is None else logits.reshape(1, -1),
            token_bytes=sum(tensor_bytes(part[..., :1, :] for part in layer.segments[0]) for layer in sliceable),
            end_bytes=sum(tensor_bytes(layer.tensors()) for layer in others),
            layout=tuple(_layout(layer) for layer in snapshot.layers),
        )


def _is_sliceable(layer: LayerState) -> TypeGuard[AttentionState]:
    return layer.is_sliceable


def _layout(layer: LayerState) -> LayerLayout:
    placed = frozenset((tensor.dtype, tensor.device) for tensor in layer.tensors())
    return LayerLayout(layer.is_sliceable, layer.window, placed)
