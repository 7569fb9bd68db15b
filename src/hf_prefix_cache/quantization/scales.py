"""What shares a scale, and how scales are kept: the same for every backend."""

import torch

from ..exceptions import UnknownOptionError, UnsupportedModelError

__all__ = ["BLOCK", "as_half", "check_blocks", "group_tokens_of"]

BLOCK = 64
"""Neighbouring values that share a scale, where scales are not by channel: the fewest that all kernels take."""

_GROUPS = (32, 64, 128)


def group_tokens_of(group_size: int | None) -> int:
    """Return the tokens of a group, by default the fewest.

    Raises:
        UnknownOptionError: A number that kernels do not take.
    """
    if group_size is not None and group_size not in _GROUPS:
        raise UnknownOptionError(f"group_size is {group_size!r}; groups have {', '.join(map(str, _GROUPS))} tokens")
    return group_size or _GROUPS[0]


def check_blocks(group_tokens: int, head_dim: int) -> None:
    """Raise `UnsupportedModelError` unless whole blocks fill a group of heads of this size."""
    if group_tokens * head_dim % BLOCK:
        raise UnsupportedModelError(
            f"{group_tokens} tokens with heads of size {head_dim} are no multiple of the {BLOCK} values that share a "
            "scale; use a group_size whose product with the size is one, or another strategy"
        )


def as_half(scales: torch.Tensor) -> torch.Tensor:
    """Return ``scales`` in float16: half the memory, and what is lost is lost before codes are chosen."""
    highest = torch.finfo(torch.float16).max
    return scales.clamp(-highest, highest).to(torch.float16)
