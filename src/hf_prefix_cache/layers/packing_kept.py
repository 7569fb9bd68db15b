"""Layers of modeling files, which are kept whole, as named tensors with a description in plain values, and back."""

from __future__ import annotations

from typing import Any

import torch

from ..exceptions import SnapshotFileError
from ..fields import Fields
from ..tensor_file import Part
from .kept import KeptKind, KeptState

__all__ = ["pack_kept", "unpack_kept"]


def pack_kept(state: KeptState, prefix: str) -> tuple[dict[str, Any], list[Part]]:
    """Return a description of ``state`` and its tensors, whose names begin with ``prefix``."""
    parts: list[Part] = []
    known: dict[int, str] = {}

    def packed(value: Any) -> Any:
        if isinstance(value, dict):
            return {"dict": [[key, packed(entry)] for key, entry in value.items()]}
        if isinstance(value, torch.Tensor):
            if id(value) not in known:  # one that two attributes hold is written once
                known[id(value)] = f"{prefix}.{len(known)}"
                parts.append(Part.of(known[id(value)], value))
            return {"tensor": known[id(value)]}
        if isinstance(value, torch.dtype | torch.device):
            return {type(value).__name__: str(value).removeprefix("torch.")}
        return {"value": value}

    values = {name: packed(value) for name, value in state.values.items()}
    description = {"kind": "kept", "length": state.length, "rows": state.rows, "window": state.window}
    return {**description, "values": values}, parts


def unpack_kept(fields: Fields, tensors: dict[str, torch.Tensor], prefix: str) -> KeptState:
    """Return the state that `pack_kept` described; what is known of its class is for the caller to add.

    Raises:
        SnapshotFileError: The description and the tensors do not fit each other.
    """
    known: dict[str, torch.Tensor] = {}

    def unpacked(table: Any, *, inside: bool = False) -> Any:
        try:
            ((form, value),) = table.items()
            if form == "dict" and not inside:
                return {key: unpacked(entry, inside=True) for key, entry in value}
            if form == "tensor":
                if value not in known:
                    known[value] = tensors.pop(value)
                return known[value]
            if form == "dtype" and isinstance(getattr(torch, value), torch.dtype):
                return getattr(torch, value)
            if form == "device":
                return torch.device(value)
            if form == "value" and (value is None or isinstance(value, bool | int | float | str)):
                return value
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise SnapshotFileError(f"{prefix} holds what no layer holds: {error!r}") from error
        raise SnapshotFileError(f"{prefix} holds what no layer holds: {form}")

    values = {name: unpacked(value) for name, value in fields.table("values").raw().items()}
    return KeptState(
        values,
        fields.count("length"),
        fields.count("rows", lowest=1),
        KeptKind(),
        fields.optional_count("window", lowest=1),
    )
