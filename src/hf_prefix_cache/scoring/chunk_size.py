"""How many tokens are computed at once."""

from typing import Any, NamedTuple

from ..compat import decoder_config
from .model_access import free_bytes, innermost_model, input_device

__all__ = ["BatchLimits", "default_limits"]

# On a CPU 256 to 1024 tokens are about equally fast in float32. Half precision multiplies faster, but weights are
# packed for it at each call, which takes as long as some 200 tokens. An accelerator needs more tokens to be busy.
_CPU_TOKENS, _CPU_HALF_TOKENS, _ACCELERATOR_TOKENS = 512, 2048, 2048
_CPU_ENOUGH, _ACCELERATOR_ENOUGH = 128, 1024
_SHARE = 0.1  # of the free memory, for the activations of one chunk and for its logits each
_CPU_LOGITS, _ACCELERATOR_LOGITS = 2**28, 2**30  # bytes of logits at once at most


class BatchLimits(NamedTuple):
    """What goes through the model at once.

    Attributes:
        max_tokens: Tokens at most.
        max_probes: Tokens whose logits are kept at most, which bounds ``[probes, vocab]``.
        enough_tokens: Tokens that keep the device busy. With so many a chunk ends where the next row has nothing in
            common with it, since attention between unrelated rows is computed and then masked.
    """

    max_tokens: int
    max_probes: int
    enough_tokens: int


def default_limits(model: Any, max_tokens: int | None = None) -> BatchLimits:
    """Return limits that are large enough to be fast, and smaller where little memory is free."""
    max_tokens = max_tokens or _batch_tokens(model)
    enough = _CPU_ENOUGH if input_device(model).type == "cpu" else _ACCELERATOR_ENOUGH
    return BatchLimits(max_tokens, _probes(model), min(enough, max_tokens))


def _batch_tokens(model: Any) -> int:
    device = input_device(model)
    decoder = decoder_config(model.config)
    itemsize = innermost_model(model).dtype.itemsize
    # Models of several transformers name no size (BLT), others one for each layer (Gemma 3n).
    hidden = getattr(decoder, "hidden_size", None) or max(weight.shape[-1] for weight in model.parameters())
    inner = getattr(decoder, "intermediate_size", None) or 0
    widest = max(4 * hidden, *(inner if isinstance(inner, list | tuple) else (inner,)))
    # Hidden states, projections and the widest layer's activations, with a margin; freed layer by layer.
    per_token = 8 * itemsize * (widest + 4 * hidden)
    most = _ACCELERATOR_TOKENS
    if device.type == "cpu":
        most = _CPU_HALF_TOKENS if itemsize < 4 else _CPU_TOKENS
    return max(16, min(most, int(_SHARE * free_bytes(device)) // per_token))


def _probes(model: Any) -> int:
    device = input_device(model)
    vocab = decoder_config(model.config).vocab_size
    most = _CPU_LOGITS if device.type == "cpu" else _ACCELERATOR_LOGITS
    budget = min(most, int(_SHARE * free_bytes(device)))
    return max(1, budget // (vocab * innermost_model(model).dtype.itemsize))
