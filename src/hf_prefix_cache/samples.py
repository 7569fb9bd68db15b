"""A few values of many tensors, read fast and again and again without holding the tensors."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch

__all__ = ["Samples"]

_VALUES = 4  # of each tensor that are compared at every look: each is far from any cache
_CLOSE_VALUES = 2**16  # the same for tensors that are looked at closely, which are small: mostly all of them


class _Place(NamedTuple):
    """Which tensor, how many of its values, how far apart."""

    number: int
    size: int
    step: int


class Samples:
    """Values spread over tensors, as the bits they are: a value that is not a number differs from itself as a number.

    Those of contiguous tensors on the CPU are read at their addresses, since making a view of each of some hundred
    tensors takes longer than all else in a look at a model. So `read` is only for tensors at the same addresses, of
    the same sizes and in the same order as those that this was made of, whose storages somebody holds meanwhile.

    Args:
        tensors: The tensors; none of them is held.
        closely: Ids of tensors to look at closely.
    """

    def __init__(self, tensors: list[torch.Tensor], closely: set[int]) -> None:
        self._groups: dict[tuple[torch.dtype, torch.device], list[_Place]] = {}
        self._at_addresses: list[tuple[int, np.ndarray[Any, Any]]] = []
        for index, tensor in enumerate(tensors):
            if tensor.device.type == "meta" or not tensor.numel():
                continue
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            wanted = _CLOSE_VALUES if id(tensor) in closely else _VALUES
            step = max(1, extent // wanted)
            place = _Place(index, min(wanted, -(-extent // step)), step)
            # Storage that was taken away for the time being is at no address.
            is_near = tensor.device.type == "cpu" and tensor.data_ptr() != 0
            if is_near and tensor.is_contiguous() and tensor.element_size() <= 8:
                self._at_addresses.append((index, _view(tensor, place)))
            else:
                self._groups.setdefault((tensor.dtype, tensor.device), []).append(place)

    def read(self, tensors: list[torch.Tensor]) -> list[np.ndarray[Any, Any]]:
        """Return the values: those read at addresses, then of each dtype and device."""
        near = [np.concatenate([view for _, view in self._at_addresses])] if self._at_addresses else []
        return near + [_gather(tensors, places) for places in self._groups.values()]

    def by_tensor(self, values: list[np.ndarray[Any, Any]]) -> dict[int, np.ndarray[Any, Any]]:
        """Return what `read` returned by the places of the tensors."""
        sizes = [[(index, len(view)) for index, view in self._at_addresses]] if self._at_addresses else []
        sizes += [[(place.number, place.size) for place in places] for places in self._groups.values()]
        found = {}
        for group, read in zip(sizes, values, strict=True):
            ends = np.cumsum([size for _, size in group])
            found.update({index: read[end - size : end] for (index, size), end in zip(group, ends, strict=True)})
        return found


def _view(tensor: torch.Tensor, place: _Place) -> np.ndarray[Any, Any]:
    itemsize = tensor.element_size()
    memory = memoryview((ctypes.c_char * (tensor.numel() * itemsize)).from_address(tensor.data_ptr()))
    return np.ndarray((place.size,), f"i{itemsize}", memory, strides=(place.step * itemsize,))


@torch.inference_mode()  # faster than no_grad, where views are made
def _gather(tensors: list[torch.Tensor], places: list[_Place]) -> np.ndarray[Any, Any]:
    with torch._C.DisableTorchFunctionSubclass():  # quantized weights answer for themselves otherwise, slowly
        found = torch.cat([torch.as_strided(tensors[number], (size,), (step,)) for number, size, step in places])
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(found.element_size(), torch.int64)
        return found.view(bits).view(len(found), -1).cpu().numpy()
