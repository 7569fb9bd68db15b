"""`PrefixQuantizedCache`: holds most of its tokens in few bits."""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, QuantizedCache

from ..compat import decoder_config
from ..exceptions import UnknownOptionError
from ..layers.quantized_kinds import QUANTIZED_KINDS
from ..layers.quantized_state import bits_per_value, quantization_error
from ..layers.scratch import Scratch
from ..quantization import QuantizationError, make_scheme
from ..snapshot import register_cache
from .base import PrefixCache, attention_layers

__all__ = ["PrefixQuantizedCache", "QuantizationReport"]


@dataclass(frozen=True)
class QuantizationReport:
    """What a quantized cache or snapshot holds, and what that costs.

    Attributes:
        scheme: How it quantizes, in words.
        tokens: Tokens held, in each row.
        nbytes: Bytes of tensor storage held.
        bytes_per_token: Bytes of all layers for one token of one row.
        bits_per_value: Bits of a quantized key or value, scales included; 0 where nothing is quantized yet.
        error: Relative error of what is quantized, as measured when it was.

    Example:
        >>> import torch, hf_prefix_cache as hpc
        >>> from hf_prefix_cache.compat import cache_argument
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
        >>> cache = hpc.PrefixQuantizedCache(config=model.config, nbits=8)
        >>> with torch.no_grad():
        ...     _ = model(torch.arange(200)[None] % 32, **cache_argument(cache))
        >>> cache.report().bits_per_value
        8.25
    """

    scheme: str
    tokens: int
    nbytes: int
    bytes_per_token: float
    bits_per_value: float
    error: QuantizationError


class PrefixQuantizedCache(PrefixCache, QuantizedCache):
    """A `QuantizedCache` with snapshot, fork and crop, that quantizes every token once.

    Tokens are quantized in groups when a group is complete, and never again: error does not accumulate, groups are
    shared by forks and snapshots, and crop works at any token. The first tokens and the last ones stay exact. While a
    layer runs, what it holds is decoded into memory that the next layer uses again.

    Running states and windows narrower than the residual stay exact. With gradients on, tokens stay exact too: run
    prefixes under ``torch.no_grad()`` or ``torch.inference_mode()``.

    Args:
        config: Configuration of the model it is for.
        backend: What quantizes: ``"bitsandbytes"``.
        nbits: Bits of a key or value, 4 or 8; scales come on top.
        quant_type: Format of 4 bits, ``"nf4"`` (the default) or ``"fp4"``.
        group_size: Tokens that are quantized together: 32 (the default), 64 or 128.
        residual_length: Tokens at the end that stay exact, at most.
        exact_first: Tokens at the start that stay exact. Most attention goes to the first ones, so that their error
            weighs more than that of all others.
        quantize_own: False keeps tokens that are added exact, and quantizes only what is loaded: a snapshot of an
            exact cache, that is the shared prefix.

    Raises:
        UnknownOptionError: A backend, number of bits, format or group size that does not exist.
        MissingPackageError: The backend's package is not installed, or not one that this version works with.
        UnsupportedLayerError: The model has layers of a kind that is not held.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import LlamaConfig
        >>> cache = hpc.PrefixQuantizedCache(config=LlamaConfig(num_hidden_layers=2), nbits=8)
        >>> cache.report().scheme[:12]
        'bitsandbytes'
    """

    strategy = "prefix-quantized"
    is_lossy = True
    is_compileable = False

    def __init__(
        self,
        *,
        config: PreTrainedConfig,
        backend: str = "bitsandbytes",
        nbits: int = 4,
        quant_type: str | None = None,
        group_size: int | None = None,
        residual_length: int = 64,
        exact_first: int = 4,
        quantize_own: bool = True,
    ) -> None:
        if not isinstance(quantize_own, bool):
            raise UnknownOptionError(f"quantize_own is {quantize_own!r}; it must be True or False")
        self.scheme = scheme = make_scheme(
            backend=backend,
            nbits=nbits,
            quant_type=quant_type,
            group_size=group_size,
            residual_length=residual_length,
            exact_first=exact_first,
        )
        specs = attention_layers(config, type(self).__name__, QUANTIZED_KINDS)
        self._scratch = Scratch()
        layers: list[Any] = [QUANTIZED_KINDS[spec.kind](spec, scheme, self._scratch, quantize_own) for spec in specs]
        Cache.__init__(self, layers=layers)
        self._last_attention = max((i for i, layer in enumerate(layers) if layer.holds_keys), default=0)
        self._config = decoder_config(config)
        self._options = {**scheme.options, "quantize_own": quantize_own}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values ``[rows, heads, tokens, head_dim]`` of a layer and return all that may be attended to.

        Raises:
            BatchSizeError: The rows differ from those held.
            UnsupportedModelError: A dtype or size of heads that is not quantized.
        """
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == self._last_attention:
            self._scratch.release()  # the last layer's attention holds it as long as it needs it
        return keys, values

    @property
    def lossy_key(self) -> str:
        """What stored prefixes it may start from beside exact ones: `PrefixSnapshot.lossy_key` of its snapshots."""
        return f"{self.strategy}: {self.scheme.name}"

    def report(self) -> QuantizationReport:
        """Return what is held, what it costs and the error that was measured when it was quantized."""
        states = [layer.state() for layer in self.layers]
        tokens, nbytes = self.seq_length, self.nbytes
        return QuantizationReport(
            scheme=self.scheme.name,
            tokens=tokens,
            nbytes=nbytes,
            bytes_per_token=nbytes / (tokens * (self.rows or 1)) if tokens else 0.0,
            bits_per_value=bits_per_value(states),
            error=quantization_error(states),
        )


register_cache(PrefixQuantizedCache.strategy, PrefixQuantizedCache)
