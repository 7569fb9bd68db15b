"""HQQ: 2, 3, 4 and 8 bits at equal distance between the lowest and the highest value of a group.

Keys have a range for each channel over a group of tokens, values for each 64 neighbouring values of a token (the axes
of KIVI, https://arxiv.org/abs/2402.02750). HQQ's search for better offsets is left out: it stops by the error of all
that is quantized together, so that what a group becomes would depend on other groups and rows.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

from ..exceptions import UnknownOptionError
from .quantizer import Quantizer
from .scales import BLOCK, as_half, check_blocks, group_tokens_of
from .trial import import_backend, try_out

__all__ = ["make_quantizers"]

# Tokens of a group by default. With 8 bits the error is small however many share a range, and 3 bits fill whole bytes
# of 10 values each, so that longer groups waste less.
_GROUP_TOKENS = {2: 32, 3: 64, 4: 32, 8: 64}
# What a trial's values from -1 to 1 may be off by: half the distance between two levels of the fewest bits.
_TOLERANCE = 0.35


def make_quantizers(nbits: int, quant_type: str | None, group_size: int | None) -> tuple[Quantizer, Quantizer]:
    """Return what quantizes keys and values, after a trial of the installed package.

    Args:
        nbits: 2, 3, 4 or 8.
        quant_type: None: HQQ has one format for each number of bits.
        group_size: Tokens of a group, and so of what shares a range in a channel: 32 (the default with 2 and 4 bits),
            64 (the default with 3 and 8) or 128.

    Raises:
        UnknownOptionError: Another value.
        MissingPackageError: The package is not installed, or does not decode what it encodes.
    """
    if nbits not in _GROUP_TOKENS:
        known = ", ".join(map(str, _GROUP_TOKENS))
        raise UnknownOptionError(f"nbits is {nbits!r}, but the backend 'hqq' has {known} bits")
    if quant_type is not None:
        raise UnknownOptionError(f"quant_type is {quant_type!r}, which belongs to the backend 'bitsandbytes'")
    size = group_tokens_of(_GROUP_TOKENS[nbits] if group_size is None else group_size)
    quantizers = Uniform(size, nbits, by_channel=True), Uniform(size, nbits, by_channel=False)
    version = import_backend("hqq", "hqq").__version__
    for quantizer in quantizers:
        try_out(quantizer, "hqq", version, _TOLERANCE)
    return quantizers


@dataclass(frozen=True)
class Uniform(Quantizer):
    """Levels at equal distance, by channel or by blocks of 64 neighbouring values."""

    group_tokens: int
    nbits: int
    by_channel: bool
    name: str = field(init=False)

    def __post_init__(self) -> None:
        axis = "channels" if self.by_channel else "blocks"
        object.__setattr__(self, "name", f"{self.nbits} bits by {axis} in groups of {self.group_tokens}")

    def check(self, head_dim: int) -> None:
        """Raise unless whole blocks of heads of this size fill a group."""
        if not self.by_channel:
            check_blocks(self.group_tokens, head_dim)

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return packed codes ``[rows, heads, groups, ...]``, steps and lowest values ``[..., groups, ranges]``."""
        columns = groups.float() if self.by_channel else groups.float().flatten(-2).unflatten(-1, (-1, BLOCK)).mT
        shape = columns.shape  # [rows, heads, groups, values of a range, ranges]
        codes, meta = _package().quantize(
            columns.movedim(-2, 0).reshape(shape[-2], -1),
            nbits=self.nbits,
            group_size=shape[-2],
            axis=0,
            optimize=False,
            device=str(groups.device),
        )
        steps = meta["scale"].reshape(*shape[:3], shape[-1])
        lowest = -meta["zero"].reshape(steps.shape) * steps
        packed = codes.unflatten(-1, (*shape[:3], shape[-1])).movedim(0, -2).contiguous()
        return packed, as_half(steps), as_half(lowest)

    def dequantize(self, packed: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Write the values into ``out``."""
        codes, steps, lowest = packed
        values = self.group_tokens if self.by_channel else BLOCK
        package = _package()
        unpack = package.unpack[package.bit_to_packing[self.nbits]]
        levels = unpack(codes.movedim(-2, 0).flatten(1), dtype=out.dtype)[:values]
        levels = levels.unflatten(1, (*codes.shape[:3], codes.shape[-1])).movedim(0, -2)
        steps, lowest = (part.to(out.dtype)[..., None, :] for part in (steps, lowest))
        # Two steps, not one: fused, some lanes of a vector would be rounded once and others twice.
        if self.by_channel:
            torch.mul(levels, steps, out=out).add_(lowest)
        else:
            out.copy_((levels * steps).add_(lowest).mT.reshape(out.shape))


def _package() -> Any:
    return import_backend("hqq.core.quantize", "hqq").Quantizer
