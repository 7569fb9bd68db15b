"""Snapshots as files: safetensors with a description, that other processes load without computing anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from .compat import LayerSpec, decoder_config, layer_specs
from .exceptions import InputMismatchError, PrefixCacheError, SnapshotFileError, SnapshotIncompleteError
from .fields import Fields
from .fingerprint import check_fingerprint, same_architecture
from .layers import DYNAMIC_KINDS, KeptState, LayerState, NothingState, RecurrentState
from .layers.crops import shortest_crop
from .layers.kept import KeptLayer
from .layers.packing import pack_state, unpack_state
from .layers.quantized_state import scheme_of
from .quantization import Scheme, make_scheme
from .tensor_file import Part, PreparedFile, prepare_file, read_header, read_tensors
from .validation import STRATEGIES, check_token_ids
from .weights import layer_devices

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .snapshot import PrefixSnapshot

__all__ = ["SnapshotHeader", "load_snapshot", "prepare_snapshot", "read_snapshot", "read_snapshot_header"]


class SnapshotHeader(NamedTuple):
    """What a file says of its snapshot.

    Attributes:
        fingerprint: Of the model that computed it.
        namespace: Tenant of the store that wrote it.
        strategy: What filled it.
        lossy_key: As in `PrefixSnapshot`.
        seq_length: Tokens.
        batch_size: Rows.
        model_type: Transformers' name of the decoder's architecture.
        layer_kinds: What each layer holds.
        floor: The shortest length that its layers, but for those of which any run can be kept, can be cropped to.
        device: Where most of it was.
    """

    fingerprint: str
    namespace: str
    strategy: str
    lossy_key: str | None
    seq_length: int
    batch_size: int
    model_type: str
    layer_kinds: tuple[str, ...]
    floor: int
    device: str


def prepare_snapshot(snapshot: PrefixSnapshot, *, namespace: str = "") -> PreparedFile:
    """Return the file of ``snapshot``, which is yet to be written. See `PrefixSnapshot.save`.

    Raises:
        SnapshotIncompleteError: It lacks token ids or a fingerprint.
        SnapshotFileError: It holds a dtype that the format does not have.
    """
    if snapshot.input_ids is None or snapshot.fingerprint is None:
        missing = "input_ids" if snapshot.input_ids is None else "fingerprint"
        raise SnapshotIncompleteError(
            f"the snapshot has no {missing}, without which nobody could check it; take it with "
            "cache.snapshot(model=..., input_ids=...) or prefill"
        )
    packed = [pack_state(state, f"layers.{index}") for index, state in enumerate(snapshot.layers)]
    scheme = scheme_of(snapshot.layers)
    description = {
        "fingerprint": snapshot.fingerprint,
        "namespace": namespace,
        "strategy": snapshot.strategy,
        "lossy_key": snapshot.lossy_key,
        "is_lossy": snapshot.is_lossy,
        "scheme": None if scheme is None else {"name": scheme.name, "options": dict(scheme.options)},
        "seq_length": snapshot.seq_length,
        "batch_size": snapshot.batch_size,
        "config": snapshot.config.to_dict(),
        "layers": [layer for layer, _ in packed],
        "floor": shortest_crop([layer for layer in snapshot.layers if not layer.is_sliceable], snapshot.seq_length),
        "device": str(next((tensor.device for layer in snapshot.layers for tensor in layer.tensors()), "cpu")),
    }
    told = {
        "input_ids": snapshot.input_ids,
        "next_logits": snapshot.next_logits,
        "padding_mask": snapshot.padding_mask,
    }
    parts = [Part.of(name, tensor) for name, tensor in told.items() if tensor is not None]
    return prepare_file(description, [*parts, *(part for _, parts in packed for part in parts)])


def load_snapshot(
    path: Path | str, *, model: PreTrainedModel | None, unverified: bool = False, allow_base: bool = False
) -> PrefixSnapshot:
    """Return the snapshot in ``path``. See `PrefixSnapshot.load`."""
    if model is None and not unverified:
        raise InputMismatchError(
            "model is None, so nothing says that the snapshot fits; pass the model that is to continue it, or "
            "unverified=True to load it unchecked"
        )

    def check(header: SnapshotHeader) -> None:
        if model is not None:
            check_fingerprint(f"the snapshot in {path}", header.fingerprint, model, allow_base=allow_base)

    config = None if model is None else decoder_config(model.config)
    _, snapshot = read_snapshot(Path(path), config=config, check=None if unverified else check)
    if model is None:
        return snapshot
    devices = layer_devices(model, len(snapshot.layers))
    layers = tuple(layer.to(device) for layer, device in zip(snapshot.layers, devices, strict=True))
    return replace(replace(snapshot, layers=()).to(devices[-1]), layers=layers)


def read_snapshot_header(path: Path) -> tuple[SnapshotHeader, torch.Tensor]:
    """Return what the file says of its snapshot, and its token ids, without verifying the file's checksum.

    Raises:
        SnapshotFileError: Not a file of this form and version, or one that is cut off.
    """
    description, input_ids = read_header(path, "input_ids")
    header = _header(Fields(description, str(path)))
    if input_ids is None or input_ids.dtype != torch.int64 or input_ids.shape[-1:] != (header.seq_length,):
        raise SnapshotFileError(f"{path} cannot be used: it has no token ids, or not {header.seq_length} of them")
    return header, input_ids


def read_snapshot(
    path: Path, *, config: PreTrainedConfig | None = None, check: Callable[[SnapshotHeader], None] | None = None
) -> tuple[SnapshotHeader, PrefixSnapshot]:
    """Return what a file says and its snapshot, mapped into memory, after everything in it was checked.

    Args:
        path: The file.
        config: Configuration of the decoder that is to continue it; by default the one in the file.
        check: Compares the header with a model before anything else is read, and may raise.

    Raises:
        SnapshotFileError: The file is not whole, not one of this version, or contradicts itself or ``config``.
        InputMismatchError: ``config`` describes another architecture.
    """
    from .snapshot import PrefixSnapshot

    where = str(path)
    description, tensors = read_tensors(
        path, None if check is None else lambda found: check(_header(Fields(found, where)))
    )
    try:
        fields = Fields(description, where)
        header = _header(fields)
        # A fingerprint covers the configuration: where it was compared, there is nothing more to read.
        saved = None if config is not None and check is not None else _config(fields)
        if config is not None and saved is not None and not same_architecture(saved, config):
            raise InputMismatchError(
                f"{path} was saved for a {type(saved).__name__} with other settings than the model's "
                f"{type(config).__name__}; load it with the model that computed it"
            )
        config = config or saved
        if config is None:
            raise SnapshotFileError(
                f"{path} was saved for a model of the type {header.model_type!r}, which this version of Transformers "
                "does not have; pass the model"
            )
        is_lossy = fields.flag("is_lossy")
        scheme = _scheme(fields.optional_table("scheme"))
        specs = _specs(config)
        described = list(fields.tables("layers"))
        _require(len(specs) == len(described), f"it has {len(described)} layers of {len(specs)}")
        states = [
            unpack_state(layer, tensors, f"layers.{index}", scheme=scheme, home=torch.device("cpu"))
            for index, layer in enumerate(described)
        ]
        layers = tuple(_of_kind(state, spec) for state, spec in zip(states, specs, strict=True))
        snapshot = PrefixSnapshot(
            layers=layers,
            seq_length=header.seq_length,
            batch_size=header.batch_size,
            strategy=header.strategy,
            config=config,
            input_ids=tensors.pop("input_ids", None),
            next_logits=tensors.pop("next_logits", None),
            fingerprint=header.fingerprint,
            padding_mask=tensors.pop("padding_mask", None),
            is_lossy=is_lossy,
        )
        _check(snapshot, specs, header, tensors)
    except SnapshotFileError as error:
        if where in str(error):
            raise
        raise SnapshotFileError(f"{path} cannot be used: {error}") from error
    return header, snapshot


def _header(fields: Fields) -> SnapshotHeader:
    strategy = fields.text("strategy")
    fields.check("strategy", strategy in STRATEGIES, strategy, f"one of {', '.join(STRATEGIES)}")
    return SnapshotHeader(
        fingerprint=fields.text("fingerprint"),
        namespace=fields.text("namespace"),
        strategy=strategy,
        lossy_key=fields.optional_text("lossy_key"),
        seq_length=fields.count("seq_length", lowest=1),
        batch_size=fields.count("batch_size", lowest=1),
        model_type=fields.table("config").text("model_type"),
        layer_kinds=tuple(layer.text("kind") for layer in fields.tables("layers")),
        floor=fields.count("floor", lowest=1),
        device=fields.text("device"),
    )


def _config(fields: Fields) -> PreTrainedConfig | None:
    table = fields.table("config")
    name = table.text("model_type")
    from transformers import CONFIG_MAPPING  # not at import: it reads every configuration

    if name not in CONFIG_MAPPING:
        return None
    try:
        config: PreTrainedConfig = CONFIG_MAPPING[name].from_dict(dict(table.raw()))
    except Exception as error:  # configurations check their values in many ways
        raise SnapshotFileError(f"its configuration of a {name!r} model is not one: {error}") from error
    return config


def _scheme(fields: Fields | None) -> Scheme | None:
    if fields is None:
        return None
    try:
        held = fields.table("options").raw()
        options: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in held.items()}
        scheme = make_scheme(**options)
    except (TypeError, ValueError) as error:
        raise SnapshotFileError(f"its options of quantization are not ones: {error}") from error
    if scheme.name != fields.text("name"):
        raise SnapshotFileError(
            f"it was quantized as {fields.text('name')}, and these options now mean {scheme.name}; compute it again"
        )
    return scheme


def _check(
    snapshot: PrefixSnapshot, specs: list[LayerSpec], header: SnapshotHeader, unused: dict[str, torch.Tensor]
) -> None:
    """Raise unless all parts of a snapshot fit each other and its configuration."""
    rows, length = snapshot.batch_size, snapshot.seq_length
    ids, logits, mask = snapshot.input_ids, snapshot.next_logits, snapshot.padding_mask
    _require(not unused, f"it holds {', '.join(sorted(unused))}, which nothing speaks of")
    _require(ids is not None and ids.dtype == torch.int64, "its token ids are missing or not int64")
    if ids is not None:
        try:
            ids = check_token_ids(ids, config=snapshot.config)
        except PrefixCacheError as error:
            raise SnapshotFileError(f"its token ids are none of the model's: {error}") from error
        _require(tuple(ids.shape) in ((1, length), (rows, length)), f"it has token ids of shape {list(ids.shape)}")
    if logits is not None:
        fits = logits.ndim == 2 and logits.shape[0] in (1, rows) and logits.is_floating_point()
        _require(fits, f"its next logits are {logits.dtype} of shape {list(logits.shape)}")
    if mask is not None:
        fits = mask.dtype == torch.bool and tuple(mask.shape) == (rows, length)
        _require(fits, f"its padding mask is {mask.dtype} of shape {list(mask.shape)}")
    for index, (spec, layer) in enumerate(zip(specs, snapshot.layers, strict=True)):
        _require(
            _is_of_kind(layer, spec.kind, spec.window, spec.states),
            f"layer {index} does not hold what {spec.kind!r} has",
        )
        _require(
            layer.length == length and layer.rows in (1, rows) and layer.can_crop_to(length),
            f"layer {index} holds {layer.rows} rows after {layer.length} tokens, not {rows} after {length}",
        )
    lossy = snapshot.lossy_key
    _require(lossy == header.lossy_key, f"it is lossy as {lossy!r} and says {header.lossy_key!r}")


def _specs(config: PreTrainedConfig) -> list[LayerSpec]:
    try:
        return layer_specs(config)
    except Exception as error:  # a configuration that is no model's
        raise SnapshotFileError(f"its configuration has no layers: {error}") from error


def _of_kind(state: LayerState, spec: LayerSpec) -> LayerState:
    """Return ``state`` with what is known of its layer's class, which a file does not say."""
    make = DYNAMIC_KINDS.get(spec.kind)
    if not isinstance(state, KeptState) or make is None:
        return state
    layer = make(spec)
    if not isinstance(layer, KeptLayer):
        raise SnapshotFileError(f"it has a layer that is kept whole where the model has {spec.kind!r}")
    return replace(state, kind=layer.kind)


def _is_of_kind(layer: LayerState, kind: str, window: int | None, states: int) -> bool:
    if isinstance(layer, KeptState | NothingState):
        return isinstance(layer, NothingState) == (kind == "dummy")
    is_running = kind in ("conv", "linear_attention", "hybrid", "hybrid_sliding")
    if kind == "dummy" or is_running != isinstance(layer, RecurrentState):
        return False
    if isinstance(layer, RecurrentState):
        if len(layer.conv) != states or (layer.attention is not None) != kind.startswith("hybrid"):
            return False
        window = window if kind == "hybrid_sliding" else None
    return layer.window == (None if kind == "full_attention" else window)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SnapshotFileError(f"{otherwise}; the file was not written by this package: compute it again")
