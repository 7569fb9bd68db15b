"""By how much quantized keys and values differ from the exact ones."""

from dataclasses import dataclass

__all__ = ["QuantizationError"]


@dataclass(frozen=True)
class QuantizationError:
    """Relative error of a quantized prefix, as measured when its tokens were quantized.

    It is the norm of the difference over the norm of what was exact, of all quantized tokens of a layer; 0 where a
    layer has none.

    Attributes:
        keys: Of the keys of each layer.
        values: Of the values of each layer.

    Example:
        >>> QuantizationError(keys=(0.02, 0.04), values=(0.1, 0.0))
        QuantizationError(keys at most 0.04, values at most 0.1)
    """

    keys: tuple[float, ...]
    values: tuple[float, ...]

    def __repr__(self) -> str:
        worst = (max(side, default=0.0) for side in (self.keys, self.values))
        return "QuantizationError(keys at most {:.2g}, values at most {:.2g})".format(*worst)
