"""A checksum of a tensor's bytes, computed where the tensor is."""

import torch

__all__ = ["tensor_checksum"]

_WORDS = 2**14  # words of 8 bytes in a row that is summed at once: what a processor's cache holds
_MIXER = 0x1E3779B97F4A7C15  # odd, with bits all over


@torch.no_grad()
def tensor_checksum(tensor: torch.Tensor) -> int:
    """Return a 64-bit sum over the bytes of ``tensor`` that any one changed value changes.

    Every word of 8 bytes enters with an odd weight that depends on its place; overflow wraps around, which loses
    nothing then. High bits are mixed into low ones before, since weights leave the highest bit as it is.
    """
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // (8 * _WORDS) * (8 * _WORDS)
    tail = raw.new_zeros(8 * _WORDS)
    tail[: raw.numel() - whole] = raw[whole:]
    weights = _weights(_WORDS, tensor.device)
    rows = 1 if tensor.device.type == "cpu" else 2**10  # elsewhere fewer, larger kernels are faster
    parts = (*raw[:whole].view(torch.int64).reshape(-1, _WORDS).split(rows), tail.view(torch.int64)[None])
    sums = torch.cat([((words ^ (words >> 32)) * weights).sum(1) for words in parts])
    return int((sums * _weights(len(sums), tensor.device)).sum()) % 2**64


def _weights(count: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(1, count + 1, device=device) * _MIXER) | 1
