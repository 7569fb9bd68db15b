"""What a cache has to do while a model with running states (Mamba and its like) runs on it."""

from typing import Any

import torch

from ..architectures import resumes_in_one_call
from ..compat import CACHE_ARGUMENT
from ..exceptions import UnsupportedModelError
from .padding import PaddingAwareCache

__all__ = ["RunningStateCache"]


class RunningStateCache(PaddingAwareCache):
    """A cache whose layers may have running states, which models read and write in place."""

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the convolution's state of a layer, ``[rows, channels, width]``, or None before the first token."""
        if state_idx == 0:
            self.layers[layer_idx].begin_step()
        return super().get_conv_state(layer_idx, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether a layer (by default the last one with a running state) has seen tokens."""
        if layer_idx is not None and CACHE_ARGUMENT != "cache":  # models ask this before 5.24, then get_conv_state
            self.layers[layer_idx].begin_step()
        return super().has_previous_state(layer_idx, state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        """Add the inputs ``[rows, channels, tokens]`` of a layer's convolution and return them behind those held.

        Raises:
            UnsupportedModelError: Several tokens behind a prefix on a model that would compute them wrongly.
            BatchSizeError: The rows differ from those held.
        """
        layer, added = self.layers[layer_idx], conv_states.shape[-1]
        if added > 1 and layer.has_previous_state[state_idx] and not resumes_in_one_call(self._config):
            layer.cancel_step()
            raise UnsupportedModelError(
                f"{added} tokens follow a prefix of {self.seq_length} in one forward; models of the type "
                f"{self._config.model_type!r} start their scan from zero then and give wrong logits: feed one "
                "token at a time, or use generate or PrefixCachedModel, which do"
            )
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
