"""Where offloaded tensors live: in host memory, or in files that are mapped into it."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import IO, Any
from weakref import WeakValueDictionary

import torch

from ..exceptions import OffloadError

__all__ = ["HostMemory", "MappedFiles", "Tier", "make_tier"]

_HOST = torch.device("cpu")
_PAGE = mmap.ALLOCATIONGRANULARITY
# The mapping behind each tensor that lies in a file, by the tensor's address; gone with the last tensor in it.
_mappings: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()


class HostMemory:
    """Host memory, pinned where it came from a device, so that copies back do not hold up the host."""

    is_file = False
    reader: ThreadPoolExecutor | None = None

    def reserve(self, nbytes: int) -> None:
        """Do nothing: memory is taken when it is needed."""

    def settle(self) -> None:
        """Do nothing."""

    def holds(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether ``tensors`` are in host memory."""
        return all(part.device.type == _HOST.type for part in tensors)

    def keep(self, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return ``tensors`` in host memory; those that are there already as they are."""
        return tuple(part if part.device.type == _HOST.type else part.to(_HOST).pin_memory() for part in tensors)

    def prefetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: host memory is there."""

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing: host memory stays."""


class MappedFiles:
    """Files without a name in a folder, mapped into memory; the system reads them when they are looked at.

    A file has no name, so that nobody else can shorten it, and its room on the disk is free again when the last
    tensor in it is gone, also where the process is killed.

    Args:
        folder: An existing folder.

    Raises:
        OffloadError: Files cannot be made there.
    """

    is_file = True

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.fspath(folder)
        # Reads a layer ahead for a device with a memory of its own; the host computes on the mapped file itself.
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="hf-prefix-cache")
        self._file: IO[bytes] | None = None
        self._used = self._size = 0
        self.reserve(_PAGE)
        self.settle()

    def reserve(self, nbytes: int) -> None:
        """Take room on the disk for ``nbytes`` that are kept before `settle` is called.

        Raises:
            OffloadError: There is not that much room, or the folder is gone or cannot be written to.
        """
        if self._file is not None and not self._used and self._size >= nbytes:
            return
        self.settle()
        if nbytes:
            self._open(nbytes)

    def settle(self) -> None:
        """Give back what was reserved and is not used."""
        if self._file is None:
            return
        if self._used < self._size:
            os.ftruncate(self._file.fileno(), self._used)
        self._file.close()
        was_used = self._used > 0
        self._file, self._used, self._size = None, 0, 0
        if was_used:
            _trim()

    def holds(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether ``tensors`` lie in files."""
        return all(_mapping_of(part) is not None for part in tensors)

    def keep(self, tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return ``tensors`` in a file, or as they are where they lie in one.

        Raises:
            OffloadError: As by `reserve`, where less was reserved.
        """
        tensors, places = tuple(tensors), []
        if self.holds(tensors):
            return tensors
        end = 0
        for part in tensors:
            places.append(end)
            end += -(-part.numel() * part.element_size() // 64) * 64
        file = self._file
        if file is None or self._used + room_for(end) > self._size:
            self.settle()
            file = self._open(room_for(end))
        descriptor = file.fileno()
        with torch.inference_mode(False), torch.no_grad():
            for part, place in zip(tensors, places, strict=True):
                _write(descriptor, part, self._used + place)
            mapping = mmap.mmap(descriptor, end, offset=self._used)
            kept = tuple(_view(mapping, place, part) for part, place in zip(tensors, places, strict=True))
        for part in kept:
            _mappings[part.data_ptr()] = mapping
        self._used += room_for(end)
        self.release(kept)
        return kept

    def _open(self, nbytes: int) -> IO[bytes]:
        file = None
        try:
            file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115 - closed when it is full
            _allocate(file.fileno(), nbytes)
        except OSError as error:
            if file is not None:
                file.close()
            what = "a file" if nbytes <= _PAGE else f"{nbytes / 1e6:.1f} MB of keys and values"
            raise OffloadError(
                f"offload_folder {self.folder!r} did not take {what}: {error.strerror}; make room there, or use a "
                "folder that exists, can be written to and has room"
            ) from error
        self._file, self._used, self._size = file, 0, nbytes
        return file

    def prefetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let the system begin to read ``tensors``, which are needed soon."""
        _advise(tensors, "MADV_WILLNEED")

    def release(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let go of the memory of ``tensors``, which are not needed soon; they stay in their files."""
        _advise(tensors, "MADV_DONTNEED")


Tier = HostMemory | MappedFiles


def make_tier(folder: str | os.PathLike[str] | None) -> Tier:
    """Return files in ``folder``, or host memory for None.

    Raises:
        OffloadError: Files cannot be made in the folder.
    """
    return HostMemory() if folder is None else MappedFiles(folder)


def room_for(nbytes: int) -> int:
    """Return the bytes of a file that a mapping of ``nbytes`` takes."""
    return -(-nbytes // _PAGE) * _PAGE


def _trim() -> None:
    """Give freed memory back to the system, where the C library can.

    What a forward computes and frees lies between the small objects of tensors that stay, and would be resident for
    good: as much memory as what was written to the file.
    """
    trim = getattr(_libc(), "malloc_trim", None)
    if trim is not None:
        trim(0)


@lru_cache
def _libc() -> Any:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # there is none of that kind
        return None


def _allocate(descriptor: int, nbytes: int) -> None:
    """Make a file ``nbytes`` long, with room on the disk for all of it where the system can promise that."""
    allocate: Any = getattr(os, "posix_fallocate", None)
    if allocate is None:
        os.ftruncate(descriptor, nbytes)
    else:
        allocate(descriptor, 0, nbytes)


def _write(descriptor: int, tensor: torch.Tensor, place: int) -> None:
    data = tensor.detach().to(_HOST).contiguous().view(-1).view(torch.uint8).numpy().data
    os.lseek(descriptor, place, os.SEEK_SET)
    while data:
        data = data[os.write(descriptor, data) :]


def _view(mapping: mmap.mmap, place: int, like: torch.Tensor) -> torch.Tensor:
    flat = torch.frombuffer(mapping, dtype=like.dtype, count=like.numel(), offset=place)
    return flat.view(like.shape)


def _mapping_of(tensor: torch.Tensor) -> mmap.mmap | None:
    return _mappings.get(tensor.untyped_storage().data_ptr())


def _advise(tensors: Iterable[torch.Tensor], advice: str) -> None:
    option = getattr(mmap, advice, None)  # not on every system
    found = {id(mapping): mapping for mapping in map(_mapping_of, tensors) if mapping is not None}
    if option is not None:
        for mapping in found.values():
            mapping.madvise(option)
