"""What a layer of any kind holds as named tensors with a description in plain values, and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from ..exceptions import SnapshotFileError
from ..fields import Fields
from ..quantization import Scheme
from ..tensor_file import Part
from .kept import KeptState
from .nothing import NothingState
from .offloaded import OffloadedState
from .packing_kept import pack_kept, unpack_kept
from .quantized_run import QuantizedRun
from .quantized_state import QuantizedState
from .recurrent import LayerState, RecurrentState
from .segments import Segment
from .state import AttentionState, KeyValues

__all__ = ["pack_state", "unpack_state"]

_SIDES = ("keys", "values")


def pack_state(state: LayerState, prefix: str) -> tuple[dict[str, Any], list[Part]]:
    """Return a description of ``state`` and its tensors, whose names begin with ``prefix``."""
    if isinstance(state, RecurrentState):
        return _pack_running(state, prefix)
    if isinstance(state, NothingState):
        return {"kind": "nothing", "length": state.length}, []
    if isinstance(state, KeptState):
        return pack_kept(state, prefix)
    description: dict[str, Any] = {"kind": "attention", "length": state.length, "window": state.window}
    if isinstance(state, QuantizedState):
        packed = [_pack_segment(part, f"{prefix}.{i}") for i, part in enumerate(state.compact().segments)]
        description |= {"kind": "quantized", "segments": [segment for segment, _ in packed]}
        return description, [part for _, parts in packed for part in parts]
    if isinstance(state, OffloadedState):
        description["kind"] = "offloaded"
    return description, _pack_exact(state.segments, prefix)


def unpack_state(
    fields: Fields, tensors: dict[str, torch.Tensor], prefix: str, *, scheme: Scheme | None, home: torch.device
) -> LayerState:
    """Return the state that `pack_state` described.

    Args:
        fields: The description.
        tensors: The tensors by name; those that are used are taken out.
        prefix: What their names begin with.
        scheme: How quantized states were quantized.
        home: Device that computes with offloaded states.

    Raises:
        SnapshotFileError: The description and the tensors do not fit each other.
    """
    kind, length = fields.text("kind"), fields.count("length")
    if kind == "running":
        return _unpack_running(fields, tensors, prefix, scheme=scheme, home=home)
    if kind == "nothing":
        return NothingState(length)
    if kind == "kept":
        return unpack_kept(fields, tensors, prefix)
    window = fields.optional_count("window", lowest=1)
    state: AttentionState
    if kind == "attention":
        state = AttentionState((_take_exact(tensors, prefix),), length, window)
    elif kind == "offloaded":
        state = OffloadedState((_take_exact(tensors, prefix),), length, window, home=home)
    elif kind == "quantized" and scheme is not None:
        segments = tuple(
            _unpack_segment(segment, tensors, f"{prefix}.{i}", scheme)
            for i, segment in enumerate(fields.tables("segments"))
        )
        state = QuantizedState(segments, length, window, scheme=scheme)
    else:
        raise SnapshotFileError(f"{prefix} is of the kind {kind!r}, which a file of this form does not have")
    _require(state.first >= 0, prefix, f"holds {length - state.first} tokens of {length}")
    return state


# -- keys and values --------------------------------------------------------------------------------------------------


def _pack_exact(segments: Sequence[KeyValues], prefix: str) -> list[Part]:
    return [
        _joined_part(f"{prefix}.{name}", [segment[side] for segment in segments]) for side, name in enumerate(_SIDES)
    ]


def _joined_part(name: str, tensors: Sequence[torch.Tensor]) -> Part:
    if len(tensors) == 1:
        return Part.of(name, tensors[0])
    rows = max(tensor.shape[0] for tensor in tensors)
    _, heads, _, size = tensors[0].shape
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors))
    shape = (rows, heads, sum(tensor.shape[2] for tensor in tensors), size)
    return Part(name, dtype, shape, lambda: torch.cat([part.expand(rows, -1, -1, -1) for part in tensors], dim=2))


def _take_exact(tensors: dict[str, torch.Tensor], prefix: str) -> KeyValues:
    keys, values = (_take(tensors, f"{prefix}.{name}") for name in _SIDES)
    _require(
        keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3] and 0 not in keys.shape,
        prefix,
        f"has keys of shape {list(keys.shape)} and values of shape {list(values.shape)}",
    )
    _require(
        keys.dtype == values.dtype and keys.is_floating_point(),
        prefix,
        f"has keys of {keys.dtype} and values of {values.dtype}",
    )
    return KeyValues(keys, values)


# -- quantized runs ---------------------------------------------------------------------------------------------------


def _pack_segment(segment: Segment, prefix: str) -> tuple[dict[str, Any], list[Part]]:
    if isinstance(segment, KeyValues):
        return {"kind": "exact"}, _pack_exact([segment], prefix)
    description = {
        "kind": "run",
        "start": segment.start,
        "tokens": segment.tokens,
        "head_dims": list(segment.head_dims),
        "dtype": str(segment.dtype).removeprefix("torch."),
    }
    parts = [
        Part.of(f"{prefix}.{name}.{index}", tensor)
        for name, packed in zip(_SIDES, (segment.keys, segment.values), strict=True)
        for index, tensor in enumerate(packed)
    ]
    return description, [*parts, Part.of(f"{prefix}.squares", segment.squares)]


def _unpack_segment(fields: Fields, tensors: dict[str, torch.Tensor], prefix: str, scheme: Scheme) -> Segment:
    if fields.text("kind") == "exact":
        return _take_exact(tensors, prefix)
    dtype: Any = getattr(torch, fields.text("dtype"), None)
    _require(isinstance(dtype, torch.dtype), prefix, "was quantized from a dtype that does not exist")
    start, tokens = fields.count("start"), fields.count("tokens", lowest=1)
    sizes = fields.list("head_dims")
    _require(
        len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes), prefix, f"has heads of {sizes}"
    )
    sides = []
    for name, quantizer, size in zip(_SIDES, (scheme.keys, scheme.values), sizes, strict=True):
        try:
            quantizer.check(size)
            like = quantizer.quantize(torch.zeros(1, 1, 1, scheme.group_tokens, size, dtype=dtype))
        except Exception as error:  # whatever a backend raises for sizes and dtypes that it never quantized
            raise SnapshotFileError(f"{prefix} cannot have been quantized from {dtype}, heads of {size}") from error
        packed = [_take(tensors, f"{prefix}.{name}.{index}") for index in range(len(like))]
        _require(
            all(
                tensor.dtype == wanted.dtype
                and tensor.ndim == wanted.ndim
                and tensor.shape[3:] == wanted.shape[3:]
                and tensor.shape[:3] == packed[0].shape[:3]
                and 0 not in tensor.shape
                for tensor, wanted in zip(packed, like, strict=True)
            ),
            prefix,
            f"has {name} of the shapes {[list(tensor.shape) for tensor in packed]}",
        )
        sides.append(tuple(packed))
    squares = _take(tensors, f"{prefix}.squares")
    _require(squares.shape == (2, 2) and squares.dtype == torch.float64, prefix, "states its error in another form")
    keys, values = sides
    held = keys[0].shape[2] * scheme.group_tokens
    _require(
        keys[0].shape[:3] == values[0].shape[:3] and start < scheme.group_tokens and start + tokens <= held,
        prefix,
        f"holds tokens {start} to {start + tokens} of {held}",
    )
    return QuantizedRun(scheme, keys, values, start, tokens, (sizes[0], sizes[1]), dtype, squares)


# -- running states ---------------------------------------------------------------------------------------------------


def _pack_running(state: RecurrentState, prefix: str) -> tuple[dict[str, Any], list[Part]]:
    held = {"conv": state.conv, "recurrent": state.recurrent}
    description: dict[str, Any] = {
        "kind": "running",
        "length": state.length,
        "widths": list(state.widths),
        **{name: [tensor is not None for tensor in states] for name, states in held.items()},
    }
    parts = [
        Part.of(f"{prefix}.{name}.{index}", tensor)
        for name, states in held.items()
        for index, tensor in enumerate(states)
        if tensor is not None
    ]
    if state.attention is not None:
        description["attention"], attention = pack_state(state.attention, f"{prefix}.attention")
        parts += attention
    return description, parts


def _unpack_running(
    fields: Fields, tensors: dict[str, torch.Tensor], prefix: str, *, scheme: Scheme | None, home: torch.device
) -> RecurrentState:
    widths, conv, recurrent = (fields.list(name) for name in ("widths", "conv", "recurrent"))
    _require(
        len(widths) == len(conv) == len(recurrent) > 0
        and all(width is None or (type(width) is int and width > 0) for width in widths)
        and all(isinstance(flag, bool) for flag in (*conv, *recurrent)),
        prefix,
        "has running states of which not all is said",
    )
    take = partial(_take_running, tensors, prefix)
    held = fields.optional_table("attention")
    attention = None if held is None else unpack_state(held, tensors, f"{prefix}.attention", scheme=scheme, home=home)
    _require(attention is None or isinstance(attention, AttentionState), prefix, "has attention of another kind")
    length = fields.count("length")
    _require(
        attention is None or attention.length == length, prefix, "has attention and running state of other lengths"
    )
    return RecurrentState(
        take("conv", conv),
        take("recurrent", recurrent),
        tuple(widths),
        length,
        attention,  # type: ignore[arg-type]
    )


def _take_running(
    tensors: dict[str, torch.Tensor], prefix: str, name: str, flags: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    found = tuple(_take(tensors, f"{prefix}.{name}.{index}") if flag else None for index, flag in enumerate(flags))
    _require(
        all(tensor is None or (tensor.ndim > 1 and tensor.is_floating_point()) for tensor in found),
        prefix,
        f"has {name} states that are none",
    )
    return found


# -- what both ways need ----------------------------------------------------------------------------------------------


def _take(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    _require(name in tensors, name, "is missing")
    return tensors.pop(name)


def _require(holds: bool, name: str, otherwise: str) -> None:
    if not holds:
        raise SnapshotFileError(f"{name} {otherwise}; the file was not written by this package: compute it again")
