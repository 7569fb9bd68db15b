"""Token ids as bytes: immutable, hashable, and compared as fast as memory is read."""

import numpy as np
import torch

__all__ = ["common_tokens", "encode_tokens", "first_tokens", "token_at", "token_count", "tokens_from"]

_WIDTH = 8  # int64, which holds the ids of every vocabulary


def encode_tokens(input_ids: torch.Tensor) -> bytes:
    """Return ``input_ids``, int64 ``[tokens]``, as bytes."""
    return bytes(input_ids.cpu().numpy().tobytes())


def token_count(tokens: bytes) -> int:
    """Return the number of ids in ``tokens``."""
    return len(tokens) // _WIDTH


def token_at(tokens: bytes, index: int) -> bytes:
    """Return the id at ``index``, empty past the end."""
    return tokens[index * _WIDTH : (index + 1) * _WIDTH]


def first_tokens(tokens: bytes, count: int) -> bytes:
    """Return the first ``count`` ids."""
    return tokens[: count * _WIDTH]


def tokens_from(tokens: bytes, index: int) -> bytes:
    """Return the ids from ``index`` on."""
    return tokens[index * _WIDTH :]


def common_tokens(tokens: bytes, index: int, run: bytes) -> int:
    """Return how many first ids of ``run`` stand in ``tokens`` from ``index`` on."""
    if tokens.startswith(run, index * _WIDTH):
        return token_count(run)
    size = min(token_count(run), token_count(tokens) - index)
    ours = np.frombuffer(tokens, dtype=np.int64, count=size, offset=index * _WIDTH)
    equal = ours == np.frombuffer(run, dtype=np.int64, count=size)
    return size if equal.all() else int(equal.argmin())
