"""`PrefixQuantizedCache`: holds most of its tokens in few bits."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, QuantizedCache

from ..compat import decoder_config
from ..exceptions import InputMismatchError, UnknownOptionError
from ..layers import DYNAMIC_KINDS
from ..layers.quantized_kinds import QUANTIZED_KINDS, QuantizedParts
from ..layers.quantized_state import bits_per_value, quantization_error, scheme_of
from ..layers.scratch import Scratch
from ..layers.tiers import make_tier
from ..quantization import QuantizationError, make_scheme
from ..snapshot import PrefixSnapshot, register_cache
from .base import attention_layers
from .offloading import OffloadingCache

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


class PrefixQuantizedCache(OffloadingCache, QuantizedCache):
    """A `QuantizedCache` with snapshot, fork and crop, that quantizes every token once.

    Tokens are quantized in groups when a group is complete, and never again: error does not accumulate, groups are
    shared by forks and snapshots, and crop works at any token. The first tokens and the last ones stay exact. While a
    layer runs, what it holds is decoded into memory that the next layer uses again.

    Running states and windows narrower than the residual stay exact. With gradients on, tokens stay exact too: run
    prefixes under ``torch.no_grad()`` or ``torch.inference_mode()``.

    Args:
        config: Configuration of the model it is for.
        backend: What quantizes: ``"bitsandbytes"``, with 4 or 8 bits, or ``"hqq"``, with 2, 3, 4 or 8.
        nbits: Bits of a key or value; scales come on top.
        value_nbits: Bits of a value, where it is to have others than a key.
        quant_type: Format of 4 bits, ``"nf4"`` (the default) or ``"fp4"``.
        group_size: Tokens that are quantized together: 32 (the default), 64 or 128.
        residual_length: Tokens at the end that stay exact, at most.
        exact_first: Tokens at the start that stay exact. Most attention goes to the first ones, so that their error
            weighs more than that of all others.
        exact_layers: Numbers of layers that stay exact, from 0 on, or from -1 on backwards.
        quantize_own: False keeps tokens that are added exact, and quantizes only what is loaded: a snapshot of an
            exact cache, that is the shared prefix.
        offloading: True keeps what is quantized in host memory, and brings it to the device one layer ahead, as
            `PrefixOffloadedCache` does. What stays exact, windows and running states stay on the device.
        offload_folder: A folder for files to keep it in instead; implies ``offloading``.

    Raises:
        UnknownOptionError: A backend, number of bits, format or group size that does not exist.
        OffloadError: The folder does not exist or cannot be written to.
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
        value_nbits: int | None = None,
        quant_type: str | None = None,
        group_size: int | None = None,
        residual_length: int = 64,
        exact_first: int = 4,
        exact_layers: Sequence[int] = (),
        quantize_own: bool = True,
        offloading: bool = False,
        offload_folder: str | os.PathLike[str] | None = None,
    ) -> None:
        for name, value in (("quantize_own", quantize_own), ("offloading", offloading)):
            if not isinstance(value, bool):
                raise UnknownOptionError(f"{name} is {value!r}; it must be True or False")
        specs = attention_layers(config, type(self).__name__, QUANTIZED_KINDS)
        self.scheme = scheme = make_scheme(
            backend=backend,
            nbits=nbits,
            value_nbits=value_nbits,
            quant_type=quant_type,
            group_size=group_size,
            residual_length=residual_length,
            exact_first=exact_first,
            exact_layers=_layer_numbers(exact_layers, len(specs)),
        )
        tier = make_tier(offload_folder) if offloading or offload_folder is not None else None
        parts = QuantizedParts(scheme, Scratch(), quantize_own, tier)
        layers: list[Any] = [
            DYNAMIC_KINDS[spec.kind](spec) if index in scheme.exact_layers else QUANTIZED_KINDS[spec.kind](spec, parts)
            for index, spec in enumerate(specs)
        ]
        Cache.__init__(self, layers=layers)
        self._start_offloading(tier, parts.scratch)
        self._config = decoder_config(config)
        self._options = {**scheme.options, "quantize_own": quantize_own}
        self._options |= {"offloading": offloading, "offload_folder": offload_folder}

    def load(self, snapshot: PrefixSnapshot, *, batch_size: int, allow_lossy: bool = False) -> None:
        """Put this cache at ``snapshot`` with ``batch_size`` rows, in place; see `PrefixCache.load`.

        Raises:
            InputMismatchError: The snapshot was quantized in another way, or belongs to another architecture.
            OffloadError: The folder has no room for it; nothing was changed.
        """
        held = scheme_of(snapshot.layers)
        if held is not None and held != self.scheme:
            raise InputMismatchError(
                f"the prefix was quantized as {held.name}, but the cache quantizes as {self.scheme.name}; make the "
                "cache with the options of the one that filled the prefix"
            )
        super().load(snapshot, batch_size=batch_size, allow_lossy=allow_lossy)

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


def _layer_numbers(layers: Sequence[int], count: int) -> tuple[int, ...]:
    """Return ``layers``, of which there are ``count``, as numbers from 0 on, in order."""
    is_list = isinstance(layers, Sequence) and not isinstance(layers, str)
    if not is_list or not all(type(number) is int and -count <= number < count for number in layers):
        raise UnknownOptionError(
            f"exact_layers is {layers!r}; it is a list of numbers of the {count} layers, from 0 to {count - 1}, or "
            f"from -1 to -{count}"
        )
    numbers = tuple(sorted({number % count for number in layers}))
    if len(numbers) == count:
        raise UnknownOptionError("exact_layers names every layer, so that nothing is quantized; use prefix-dynamic")
    return numbers


register_cache(PrefixQuantizedCache.strategy, PrefixQuantizedCache)
