"""Which layer class of a quantized cache holds which of Transformers' layer types."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..compat import LayerSpec
from ..quantization import Scheme
from .hybrid import HybridLayer
from .nothing import PrefixNothingLayer
from .quantized import PrefixQuantizedLayer, PrefixQuantizedSlidingWindowLayer
from .recurrent import PrefixRecurrentLayer
from .scratch import Scratch
from .tiers import Tier

__all__ = ["QUANTIZED_KINDS", "QuantizedParts"]


class PrefixQuantizedHybridLayer(HybridLayer, PrefixQuantizedLayer):  # type: ignore[misc]
    """A running state, which stays exact and on the device, beside full attention that is quantized."""

    is_compileable = False

    def __init__(self, scheme: Scheme, scratch: Scratch, number_of_states: int, **options: Any) -> None:
        PrefixQuantizedLayer.__init__(self, scheme, scratch, **options)
        PrefixRecurrentLayer.__init__(self, number_of_states)


class PrefixQuantizedHybridSlidingWindowLayer(  # type: ignore[misc]
    HybridLayer, PrefixQuantizedSlidingWindowLayer
):
    """A running state, which stays exact, beside attention with a window that is quantized."""

    is_compileable = False

    def __init__(
        self, sliding_window: int, scheme: Scheme, scratch: Scratch, number_of_states: int, *, quantize_own: bool
    ) -> None:
        PrefixQuantizedSlidingWindowLayer.__init__(self, sliding_window, scheme, scratch, quantize_own=quantize_own)
        PrefixRecurrentLayer.__init__(self, number_of_states)
        self.window = sliding_window


@dataclass(frozen=True)
class QuantizedParts:
    """What the layers of a quantized cache have in common.

    Attributes:
        scheme: How they quantize.
        scratch: Memory to decode into.
        quantize_own: Whether tokens that are added are quantized, and not only those that are loaded.
        tier: Where quantized tokens of full attention live, apart from the device; None for on it.
    """

    scheme: Scheme
    scratch: Scratch
    quantize_own: bool
    tier: Tier | None


def _full(parts: QuantizedParts) -> Any:
    return PrefixQuantizedLayer(parts.scheme, parts.scratch, quantize_own=parts.quantize_own, tier=parts.tier)


def _sliding(spec: LayerSpec, parts: QuantizedParts) -> Any:
    window = int(spec.window or 0)
    return PrefixQuantizedSlidingWindowLayer(window, parts.scheme, parts.scratch, quantize_own=parts.quantize_own)


def _hybrid(spec: LayerSpec, parts: QuantizedParts) -> Any:
    options: dict[str, Any] = {"quantize_own": parts.quantize_own, "tier": parts.tier}
    return PrefixQuantizedHybridLayer(parts.scheme, parts.scratch, spec.states, **options)


def _hybrid_sliding(spec: LayerSpec, parts: QuantizedParts) -> Any:
    window, own = int(spec.window or 0), parts.quantize_own
    return PrefixQuantizedHybridSlidingWindowLayer(window, parts.scheme, parts.scratch, spec.states, quantize_own=own)


QUANTIZED_KINDS: dict[str, Callable[[LayerSpec, QuantizedParts], Any]] = {
    "full_attention": lambda spec, parts: _full(parts),
    "sliding_attention": _sliding,
    "chunked_attention": _sliding,
    "conv": lambda spec, parts: PrefixRecurrentLayer(spec.states),
    "linear_attention": lambda spec, parts: PrefixRecurrentLayer(spec.states),
    "hybrid": _hybrid,
    "hybrid_sliding": _hybrid_sliding,
    "dummy": lambda spec, parts: PrefixNothingLayer(),
}
"""Makes a layer of a quantized cache."""
