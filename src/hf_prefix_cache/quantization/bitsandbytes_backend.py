"""bitsandbytes: 8 bits in blocks, and the 4-bit formats nf4 and fp4, on CPU and GPU.

The package decodes; codes are chosen here. Its own encoder takes 350 ns for a 4-bit value on a CPU and knows flat
blocks only, while keys are worth a scale and an offset for each channel: channels of keys differ much in size and are
far from zero, and with one scale for a token's channels the error of nf4 keys is twice as large. Since bitsandbytes
decodes ``table[code] * scale``, channels are first shifted and scaled to -1 to 1, and decoded with a scale of 1.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ..exceptions import UnknownOptionError
from .quantizer import Quantizer
from .scales import BLOCK, as_half, check_blocks, group_tokens_of
from .trial import import_backend, try_out

__all__ = ["make_quantizers"]

_FOUR_BIT = ("nf4", "fp4")
# Blocks in which values of scale 1 are decoded: the scale is the same for all, so as few as the kernels take.
_UNIT_BLOCK = 1024
# 8-bit codes are levels of equal distance: bitsandbytes' own table is denser at zero, and its error twice as large.
_LEVELS = 127
# What a trial's values from -1 to 1 may be off by: half the widest distance between two levels, which fp4 has.
_TOLERANCE = 0.17


def make_quantizers(nbits: int, quant_type: str | None, group_size: int | None) -> tuple[Quantizer, Quantizer]:
    """Return what quantizes keys and values, after a trial of the installed package.

    Args:
        nbits: 4 or 8.
        quant_type: ``"nf4"`` (the default) or ``"fp4"`` for 4 bits; None for 8.
        group_size: Tokens of a group, and so of what shares a scale in a channel: 32 (the default), 64 or 128.

    Raises:
        UnknownOptionError: Another value.
        MissingPackageError: The package is not installed, or does not decode what this version encodes.
    """
    if nbits not in (4, 8):
        raise UnknownOptionError(f"nbits is {nbits!r}, but the backend 'bitsandbytes' has 4 and 8 bits")
    if nbits == 8 and quant_type is not None:
        raise UnknownOptionError(f"quant_type is {quant_type!r}, which belongs to 4 bits; leave it out with nbits=8")
    if nbits == 4 and quant_type not in (None, *_FOUR_BIT):
        raise UnknownOptionError(f"quant_type is {quant_type!r}; the 4-bit formats are {', '.join(_FOUR_BIT)}")
    size = group_tokens_of(group_size)
    quantizers: tuple[Quantizer, Quantizer]
    if nbits == 8:
        quantizers = EightBit(size), EightBit(size)
    else:
        name = quant_type or "nf4"
        quantizers = FourBitByChannel(size, name), FourBit(size, name)
    with _without_advice():
        version = import_backend("bitsandbytes", "bitsandbytes").__version__
    for quantizer in quantizers:
        try_out(quantizer, "bitsandbytes", version, _TOLERANCE)
    return quantizers


@contextmanager
def _without_advice() -> Iterator[None]:
    """Keep silent, inside, what its import warns of: a faster kernel for linear layers, which nothing here uses."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@dataclass(frozen=True)
class EightBit(Quantizer):
    """8 bits, with one scale for each 64 neighbouring values, which are channels of one token or of a few."""

    group_tokens: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"8 bits by blocks in groups of {self.group_tokens}")

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes ``[rows, heads, groups, values]`` and scales ``[rows, heads, groups, blocks]``."""
        blocks, scales = _scaled_blocks(groups)
        codes = (blocks * _LEVELS).round_().add_(_LEVELS).to(torch.uint8)
        return codes.flatten(-2), scales

    def check(self, head_dim: int) -> None:
        """Raise unless whole blocks of heads of this size fill a group."""
        check_blocks(self.group_tokens, head_dim)

    def dequantize(self, packed: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Write the values into ``out``."""
        codes, scales = packed
        functional = _package()
        state = functional.QuantState(
            absmax=scales.float().flatten(),
            code=_levels(out.device),
            blocksize=BLOCK,
            dtype=out.dtype,
        )
        out.copy_(functional.dequantize_blockwise(codes.flatten(), state).view(out.shape))


@dataclass(frozen=True)
class FourBit(Quantizer):
    """nf4 or fp4, with one scale for each 64 neighbouring values, which are channels of one token or of a few."""

    group_tokens: int
    quant_type: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.quant_type} by blocks in groups of {self.group_tokens}")

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes ``[rows, heads, groups, values / 2]`` and scales ``[rows, heads, groups, blocks]``."""
        blocks, scales = _scaled_blocks(groups)
        return _encode(blocks.flatten(-2), self.quant_type), scales

    def check(self, head_dim: int) -> None:
        """Raise unless whole blocks of heads of this size fill a group."""
        check_blocks(self.group_tokens, head_dim)

    def dequantize(self, packed: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Write the values into ``out``."""
        codes, scales = packed
        out.copy_(_decode(codes, scales.float().flatten(), BLOCK, self.quant_type, out))


@dataclass(frozen=True)
class FourBitByChannel(Quantizer):
    """nf4 or fp4, with a scale and an offset for each channel of a group of ``group_tokens`` tokens."""

    group_tokens: int
    quant_type: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", f"{self.quant_type} by channels in groups of {self.group_tokens}")

    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return codes ``[rows, heads, groups, values / 2]``, scales and offsets ``[..., groups, head_dim]``."""
        groups = groups.float()
        lowest, highest = groups.aminmax(dim=-2)
        offsets = as_half((lowest + highest) / 2)
        scales = as_half(torch.maximum(highest - offsets.float(), offsets.float() - lowest))
        shifted = (groups - offsets.float()[..., None, :]) / _divisor(scales)[..., None, :]
        return _encode(shifted.flatten(-2), self.quant_type), scales, offsets

    def check(self, head_dim: int) -> None:
        """Accept heads of any size: every channel has a scale of its own."""

    def dequantize(self, packed: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Write the values into ``out``."""
        codes, scales, offsets = packed
        units = torch.ones(-(-out.numel() // _UNIT_BLOCK), device=out.device)
        decoded = _decode(codes, units, _UNIT_BLOCK, self.quant_type, out)
        scales, offsets = (part.to(out.dtype)[..., None, :] for part in (scales, offsets))
        # Not addcmul: it fuses, in some lanes of a vector only, and the same code would decode to different bits.
        torch.add(decoded.mul_(scales), offsets, out=out)


def _scaled_blocks(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``groups`` as blocks ``[rows, heads, groups, blocks, 64]`` from -1 to 1, and their scales."""
    blocks = groups.float().flatten(-2).unflatten(-1, (-1, BLOCK))
    scales = as_half(blocks.abs().amax(-1))
    return (blocks / _divisor(scales)[..., None]).clamp_(-1, 1), scales


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """Return ``scales`` in float32 with 1 in place of 0, where all that is scaled is 0."""
    return torch.where(scales == 0, 1.0, scales.float())


def _encode(values: torch.Tensor, quant_type: str) -> torch.Tensor:
    """Return the codes of the levels nearest to ``values``, ``[..., n]`` from -1 to 1, two in a byte."""
    thresholds, order = _nearest(quant_type, values.device)
    codes = order[torch.bucketize(values, thresholds, out_int32=True)].unflatten(-1, (-1, 2))
    return codes[..., 0] << 4 | codes[..., 1]


def _decode(
    codes: torch.Tensor, scales: torch.Tensor, block_size: int, quant_type: str, like: torch.Tensor
) -> torch.Tensor:
    """Return the values of ``codes``, each block times its scale, in the shape and dtype of ``like``."""
    functional = _package()
    state = functional.QuantState(
        absmax=scales,
        shape=torch.Size([like.numel()]),
        dtype=like.dtype,
        blocksize=block_size,
        quant_type=quant_type,
    )
    return functional.dequantize_4bit(codes.reshape(-1, 1), state).view(like.shape)


@lru_cache
def _nearest(quant_type: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the thresholds between the levels of a format, and the code of each level, from the lowest up."""
    with torch.inference_mode(False):
        levels, order = _package().get_4bit_type(quant_type, device="cpu").sort()
        return ((levels[1:] + levels[:-1]) / 2).to(device), order.to(device, torch.uint8)


@lru_cache
def _levels(device: torch.device) -> torch.Tensor:
    """Return the value of each 8-bit code, float32 ``[256]``; the last code is not used."""
    with torch.inference_mode(False):
        return (torch.arange(256, dtype=torch.float32) - _LEVELS).div_(_LEVELS).to(device)


def _package() -> Any:
    return import_backend("bitsandbytes", "bitsandbytes").functional
