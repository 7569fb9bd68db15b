"""Memory that the layers of a cache decode into, one after the other, while a forward runs."""

import math

import torch

from .state import KeyValues

__all__ = ["Scratch"]


class Scratch:
    """One buffer for each device and dtype, used again by the next layer.

    It is used again only if nothing else holds it by then. A model that keeps what a layer attended to (to attend to
    it in later layers, say) keeps the memory with it, and the next layer gets another buffer.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def take(
        self, keys: tuple[int, ...], values: tuple[int, ...], *, device: torch.device, dtype: torch.dtype
    ) -> KeyValues:
        """Return tensors of these shapes, with anything in them."""
        sizes = math.prod(keys), math.prod(values)
        buffer = self._buffers.pop((device, dtype), None)
        if buffer is None or buffer.numel() < sum(sizes) or not _is_free(buffer):
            buffer = torch.empty(sum(sizes), device=device, dtype=dtype)
        self._buffers[device, dtype] = buffer
        return KeyValues(buffer[: sizes[0]].view(keys), buffer[sizes[0] : sum(sizes)].view(values))

    def release(self) -> None:
        """Let go of the memory; what is still in use stays until it no longer is."""
        self._buffers.clear()


def _is_free(buffer: torch.Tensor) -> bool:
    """Return whether nothing but ``buffer`` itself holds its storage, and it can be written to in the current mode."""
    if buffer.is_inference() != torch.is_inference_mode_enabled():
        return False
    storage = buffer.untyped_storage()
    count = getattr(torch._C, "_storage_Use_Count", None)  # counts the buffer's reference and that of `storage`
    return count is not None and count(storage._cdata) == 2
