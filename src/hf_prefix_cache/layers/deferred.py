"""Hands the shared part of a layer to attention beside its own part, instead of gathering both."""

from dataclasses import dataclass

import torch

from .state import KeyValues

__all__ = ["SharedPart", "attach", "attached"]

_NAME = "_hf_prefix_cache_shared"


@dataclass
class SharedPart:
    """The shared segments of a layer, and whether attention has taken them.

    Models pass keys from the cache straight to attention. One that did not would lose the mark on the tensor and
    attend to own tokens only; the cache therefore asks at the next layer whether the mark arrived.
    """

    segments: tuple[KeyValues, ...]
    is_taken: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all segments."""
        return sum(segment.tokens for segment in self.segments)


def attach(keys: torch.Tensor, part: SharedPart) -> torch.Tensor:
    """Mark ``keys`` (a tensor made for this call) as lacking ``part`` before them."""
    setattr(keys, _NAME, part)
    return keys


def attached(keys: torch.Tensor) -> SharedPart | None:
    """Return the part that ``keys`` lacks, and note that it was taken; None for ordinary keys."""
    part: SharedPart | None = getattr(keys, _NAME, None)
    if part is not None:
        part.is_taken = True
    return part
