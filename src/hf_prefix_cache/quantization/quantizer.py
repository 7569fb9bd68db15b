"""What turns keys or values into few bits and back: the small interface that backends implement."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..exceptions import UnsupportedModelError

__all__ = ["Quantizer", "Scheme"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Quantizer(ABC):
    """Quantizes the keys or the values of a layer, in groups of ``group_tokens`` tokens that stand for themselves.

    Nothing in a group depends on another group or on another row, so groups can be shared, selected and cut freely.

    Attributes:
        name: What it does, in words; two quantizers of one name give the same numbers.
        group_tokens: Tokens of a group.
    """

    name: str
    group_tokens: int

    @abstractmethod
    def check(self, head_dim: int) -> None:
        """Raise `UnsupportedModelError` unless heads of this size can be quantized."""

    @abstractmethod
    def quantize(self, groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return ``groups``, ``[rows, heads, groups, group_tokens, head_dim]``, in few bits.

        Returns:
            Contiguous tensors ``[rows, heads, groups, ...]``: codes, and what they are scaled by.
        """

    @abstractmethod
    def dequantize(self, packed: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        """Write what `quantize` made into ``out``, ``[rows, heads, groups, group_tokens, head_dim]``, of any strides.

        What is written to one place never depends on what else is written in the call.
        """


@dataclass(frozen=True)
class Scheme:
    """How a cache quantizes.

    Attributes:
        backend: Name of the backend.
        keys: What quantizes keys.
        values: What quantizes values, in groups of as many tokens.
        residual_length: Tokens at the end that stay exact, at most.
        exact_first: Tokens at the start of a sequence that stay exact: most attention goes to the first ones, so that
            their error weighs more than that of all others together.
        exact_layers: Numbers of layers that stay exact.
        options: The options that make a cache quantize like this.
    """

    backend: str
    keys: Quantizer
    values: Quantizer
    residual_length: int
    exact_first: int
    exact_layers: tuple[int, ...]
    options: Mapping[str, Any] = field(compare=False, repr=False)

    @property
    def group_tokens(self) -> int:
        """Tokens of a group."""
        return self.keys.group_tokens

    @property
    def name(self) -> str:
        """What it does, in words: prefixes of different names are never taken for each other."""
        return (
            f"{self.backend}, keys {self.keys.name}, values {self.values.name}, all but the first {self.exact_first} "
            f"and the last {self.residual_length} tokens"
            + (f", exact layers {', '.join(map(str, self.exact_layers))}" if self.exact_layers else "")
        )

    def check(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Raise `UnsupportedModelError` unless keys and values like these, ``[..., head_dim]``, can be quantized."""
        if keys.dtype not in _DTYPES:
            raise UnsupportedModelError(
                f"keys of {keys.dtype} are not quantized; run the model in float32, float16 or bfloat16, or use "
                "another strategy"
            )
        self.keys.check(keys.shape[-1])
        self.values.check(values.shape[-1])
