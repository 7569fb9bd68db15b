"""Named tensors in one file: written whole or not at all, checked in every bit, and mapped into memory when read.

The form is that of safetensors, so any of its readers opens the file: eight bytes with the header's length, the header
as JSON, then the tensors' bytes, without gaps. Nothing in it is ever executed.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from .exceptions import SnapshotFileError

__all__ = ["Part", "PreparedFile", "StoredTensors", "prepare_file", "read_header", "read_tensors"]

_FORMAT = "hf-prefix-cache 1"
_UNKNOWN_CHECKSUM = "0" * 8
_PAGE = 16_384  # bytes of a sum: few pages of a disk
_HEADER_LIMIT = 100_000_000  # as in safetensors: a header beyond that is an attack or an accident
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Part(NamedTuple):
    """A tensor to write.

    Attributes:
        name: Its name in the file.
        dtype: Its dtype.
        shape: Its shape.
        make: Returns it: parts are made one at a time, so that no second copy of all is held.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Part:
        """Return a tensor that exists as a part."""
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


class StoredTensors(NamedTuple):
    """What a file holds.

    Attributes:
        description: What was given to `prepare_file`, decoded.
        tensors: The tensors by name: views of the mapped file.
    """

    description: Any
    tensors: dict[str, torch.Tensor]


class _Layout(NamedTuple):
    description: Any
    entries: dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    body: int  # where the tensors' bytes begin
    checksum: str
    checksum_at: int  # where it stands in the file


class PreparedFile(NamedTuple):
    """A file that is ready to be written.

    Attributes:
        header: Its first part, with room for the checksum.
        parts: The tensors behind it, in order.
    """

    header: bytes
    parts: list[Part]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return 8 + len(self.header) + sum(part.nbytes for part in self.parts)

    def write(self, path: Path) -> None:
        """Write the file to ``path``, whole or not at all.

        It goes to a temporary file beside it, which is flushed to the disk before it takes the place of ``path``: a
        reader sees the old file or the new one, also after a crash.
        """
        with _replacing(path) as file:
            file.write(len(self.header).to_bytes(8, "little"))
            file.write(self.header)
            checksum = zlib.crc32(self.header)
            for part in self.parts:
                data = _bytes_of(part.make())
                checksum = _checksum(data, checksum)
                file.write(data)
            file.seek(8 + self.header.index(_UNKNOWN_CHECKSUM.encode()))
            file.write(f"{checksum:08x}".encode())


def prepare_file(description: Any, parts: Sequence[Part]) -> PreparedFile:
    """Return a file of ``parts``.

    Args:
        description: What can be written as JSON.
        parts: The tensors.

    Raises:
        SnapshotFileError: A dtype that the format does not have.
    """
    # Wide values first: each then stands at a multiple of its size, as views into mapped memory need it.
    ordered = sorted(parts, key=lambda part: -part.dtype.itemsize)
    entries: dict[str, Any] = {
        "__metadata__": {
            "checksum": _UNKNOWN_CHECKSUM,
            "format": _FORMAT,
            "prefix": json.dumps(description, ensure_ascii=True, default=str),
        }
    }
    position = 0
    for part in ordered:
        if part.dtype not in _NAMES:
            raise SnapshotFileError(f"{part.name} has dtype {part.dtype}, which a snapshot file cannot hold")
        offsets = [position, position + part.nbytes]
        entries[part.name] = {"dtype": _NAMES[part.dtype], "shape": list(part.shape), "data_offsets": offsets}
        position = offsets[1]
    header = json.dumps(entries, separators=(",", ":")).encode()
    return PreparedFile(header + b" " * (-len(header) % 8), ordered)


def read_header(path: Path, name: str) -> tuple[Any, torch.Tensor | None]:
    """Return the description in the file and a copy of one tensor, without reading more or verifying the checksum.

    Args:
        path: The file.
        name: The tensor; None is returned for one that is not there.

    Raises:
        SnapshotFileError: Not a file of this form and version, or one that is cut off.
        OSError: It cannot be opened.
    """
    with _mapped(path) as mapped:
        layout = _parse(path, mapped)
        found = _views(mapped, layout, [name] if name in layout.entries else []).get(name)
        return layout.description, None if found is None else found.clone()


def read_tensors(path: Path, check: Callable[[Any], object] | None = None) -> StoredTensors:
    """Return what the file holds. Its tensors are views of the mapped file; writing to them never changes the file.

    Args:
        path: The file.
        check: Is given the description before the tensors are read, and may raise.

    Raises:
        SnapshotFileError: Not a file of this form and version, cut off, or changed in any bit.
        OSError: It cannot be opened.
    """
    with _mapped(path) as mapped:
        layout = _parse(path, mapped)
        if check is not None:
            check(layout.description)
        header, start, blank = mapped[8 : layout.body], layout.checksum_at - 8, _UNKNOWN_CHECKSUM.encode()
        checksum = zlib.crc32(header[:start] + blank + header[start + len(blank) :])
        for _, _, begin, end in sorted(layout.entries.values(), key=lambda entry: entry[2:]):
            with memoryview(mapped) as whole, whole[layout.body + begin : layout.body + end] as data:
                checksum = _checksum(data, checksum)
        _require(path, f"{checksum:08x}" == layout.checksum, "its checksum does not match: it is damaged")
        return StoredTensors(layout.description, _views(mapped, layout, layout.entries))


def _checksum(data: memoryview, before: int) -> int:
    """Return the checksum of what gave ``before`` and of ``data``: CRC-32 of the sum of each page.

    Sums of words are computed as fast as memory is read, CRC-32 of all bytes is not. Any changed bit changes a sum, as
    does any other damage but what cancels out inside of one page; and their order, which a disk may mix up, counts.
    """
    whole = len(data) // _PAGE * _PAGE
    pages = np.frombuffer(data, dtype=np.uint64, count=whole // 8).reshape(-1, _PAGE // 8)
    before = zlib.crc32(pages.sum(axis=1, dtype=np.uint64).tobytes(), before)
    return zlib.crc32(data[whole:], before)


def _views(mapped: mmap.mmap, layout: _Layout, names: Iterable[str]) -> dict[str, torch.Tensor]:
    with torch.inference_mode(False):  # what was read must serve training too
        data = torch.frombuffer(mapped, dtype=torch.uint8)
        views = {}
        for name in names:
            dtype, shape, start, stop = layout.entries[name]
            views[name] = data[layout.body + start : layout.body + stop].view(dtype).reshape(shape)
        return views


@contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes ``path`` if nothing fails."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    descriptor = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def _mapped(path: Path) -> Iterator[mmap.mmap]:
    """Map a file into memory, privately; the map lives as long as views of it do."""
    target = path.resolve()
    _require(
        path, target.parent == path.parent.resolve(), f"it is a link to {target}, out of its directory; name that file"
    )
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        _require(path, size > 8, f"it has {size} bytes: it is cut off")
        yield mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)


def _parse(path: Path, mapped: mmap.mmap) -> _Layout:
    """Check the header against the file's size, and return what it says."""
    size = len(mapped)
    length = int.from_bytes(mapped[:8], "little")
    _require(
        path,
        length <= min(size - 8, _HEADER_LIMIT),
        f"its header claims {length} bytes of {size}: it is cut off, or no snapshot",
    )
    header = mapped[8 : 8 + length]
    try:
        entries = json.loads(header)
    except (ValueError, RecursionError) as error:
        raise _failure(path, f"its header is not JSON: {error}") from error
    _require(path, isinstance(entries, dict), "its header is not a table")
    metadata = entries.pop("__metadata__", None)
    _require(path, isinstance(metadata, dict) and "format" in metadata, "it was not saved by hf-prefix-cache")
    _require(
        path,
        metadata["format"] == _FORMAT,
        f"its format is {metadata['format']!r} and this version reads {_FORMAT!r}: save it anew",
    )
    checksum = metadata.get("checksum")
    _require(path, isinstance(checksum, str) and len(checksum) == len(_UNKNOWN_CHECKSUM), "it has no checksum")
    mark = b'"checksum":"'
    place = header.find(mark + checksum.encode(errors="replace"))
    _require(path, place >= 0, "its checksum is not where it was written")
    try:
        description = json.loads(metadata.get("prefix", ""))
    except (TypeError, ValueError, RecursionError) as error:
        raise _failure(path, f"what describes it is not JSON: {error}") from error
    return _Layout(
        description,
        _tensors_at(path, entries, size - 8 - length, 8 + length),
        8 + length,
        checksum,
        8 + place + len(mark),
    )


def _tensors_at(
    path: Path, entries: Mapping[str, Any], body: int, begin: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    """Check where each tensor is said to be: side by side, all of the body's bytes, as many as its shape takes."""
    found = {}
    for name, entry in entries.items():
        _require(
            path,
            isinstance(entry, dict)
            and isinstance(entry.get("dtype"), str)
            and _whole_numbers(entry.get("shape"))
            and _whole_numbers(entry.get("data_offsets"))
            and len(entry["data_offsets"]) == 2,
            f"what it says of {name!r} is malformed",
        )
        _require(path, entry["dtype"] in _DTYPES, f"{name!r} has the dtype {entry['dtype']!r}, which it cannot have")
        dtype, (start, stop) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        wanted = math.prod(entry["shape"]) * dtype.itemsize
        _require(
            path,
            start <= stop <= body and stop - start == wanted,
            f"{name!r} takes {wanted} bytes and is said to be at {start} to {stop} of {body}",
        )
        _require(path, (begin + start) % dtype.itemsize == 0, f"{name!r} is not aligned")
        found[name] = dtype, tuple(entry["shape"]), start, stop
    position = 0
    for name, (_, _, start, stop) in sorted(found.items(), key=lambda item: item[1][2:]):
        _require(path, start == position, f"{name!r} starts at {start}, but the tensor before it ends at {position}")
        position = stop
    _require(path, position == body, f"its tensors take {position} bytes and it holds {body}")
    return found


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    values: Any = flat.view(torch.uint8).numpy()
    return memoryview(values)


def _require(path: Path, holds: bool, otherwise: str) -> None:
    if not holds:
        raise _failure(path, otherwise)


def _failure(path: Path, what: str) -> SnapshotFileError:
    return SnapshotFileError(f"{path} cannot be used: {what}; nothing of it was taken over: compute and save it again")
