"""How many bytes of tensor storage are held, each storage counted once."""

from collections.abc import Iterable

import torch

__all__ = ["storage_bytes", "storages"]


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return the address and size in bytes of every storage behind ``tensors``."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all storages behind ``tensors``, each once."""
    return sum(storages(tensors).values())
