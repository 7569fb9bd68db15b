"""Which layer class of a quantized cache holds which of Transformers' layer types."""

from collections.abc import Callable
from typing import Any

from ..compat import LayerSpec
from ..quantization import Scheme
from .hybrid import HybridLayer
from .quantized import PrefixQuantizedLayer, PrefixQuantizedSlidingWindowLayer
from .recurrent import PrefixRecurrentLayer
from .scratch import Scratch

__all__ = ["QUANTIZED_KINDS"]


class PrefixQuantizedHybridLayer(HybridLayer, PrefixQuantizedLayer):  # type: ignore[misc, override]
    """A running state, which stays exact, beside full attention that is quantized."""

    is_compileable = False

    def __init__(self, scheme: Scheme, scratch: Scratch, number_of_states: int, *, quantize_own: bool) -> None:
        PrefixQuantizedLayer.__init__(self, scheme, scratch, quantize_own=quantize_own)
        PrefixRecurrentLayer.__init__(self, number_of_states)


class PrefixQuantizedHybridSlidingWindowLayer(  # type: ignore[misc, override]
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


def _window(spec: LayerSpec) -> int:
    return int(spec.window or 0)


_Make = Callable[[LayerSpec, Scheme, Scratch, bool], Any]

QUANTIZED_KINDS: dict[str, _Make] = {
    "full_attention": lambda spec, scheme, scratch, own: PrefixQuantizedLayer(scheme, scratch, quantize_own=own),
    "sliding_attention": lambda spec, scheme, scratch, own: PrefixQuantizedSlidingWindowLayer(
        _window(spec), scheme, scratch, quantize_own=own
    ),
    "chunked_attention": lambda spec, scheme, scratch, own: PrefixQuantizedSlidingWindowLayer(
        _window(spec), scheme, scratch, quantize_own=own
    ),
    "conv": lambda spec, scheme, scratch, own: PrefixRecurrentLayer(spec.states),
    "linear_attention": lambda spec, scheme, scratch, own: PrefixRecurrentLayer(spec.states),
    "hybrid": lambda spec, scheme, scratch, own: PrefixQuantizedHybridLayer(
        scheme, scratch, spec.states, quantize_own=own
    ),
    "hybrid_sliding": lambda spec, scheme, scratch, own: PrefixQuantizedHybridSlidingWindowLayer(
        _window(spec), scheme, scratch, spec.states, quantize_own=own
    ),
}
"""Makes a layer of a quantized cache; the last argument is ``quantize_own``."""
