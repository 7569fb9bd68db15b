"""How many bytes of tensor storage are held, each storage counted once."""

from collections.abc import Iterable

import torch

__all__ = ["storage_bytes"]


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of all storages behind ``tensors``, each once."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        found[storage.device, storage.data_ptr()] = storage.nbytes()
    return sum(found.values())
