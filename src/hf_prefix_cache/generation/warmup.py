"""`warmup`: compile decoding ahead, so that no user waits for it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from transformers import CompileConfig, GenerationConfig

from ..exceptions import BatchSizeError, CacheCapacityError, UnsupportedModelError
from .compiled import will_compile
from .static_sizes import StaticSize, keep_buffers, release_buffers

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["Warmup", "warmup"]

# The prompt, and then decode steps: the first compiles, the second shows that it stays compiled.
_PROMPT, _NEW = 2, 3


@dataclass(frozen=True)
class Warmup:
    """What was compiled ahead.

    Attributes:
        batch_sizes: Rows of the batches; smaller ones run in the next larger one.
        max_cache_len: Tokens that each row may grow to.
        graphs: Graphs that were compiled.
        seconds: How long it took.

    Example:
        >>> Warmup(batch_sizes=(1, 4), max_cache_len=512, graphs=2, seconds=40.0).batch_sizes
        (1, 4)
    """

    batch_sizes: tuple[int, ...]
    max_cache_len: int
    graphs: int
    seconds: float
    _model: weakref.ref[PreTrainedModel] | None = field(default=None, repr=False, compare=False)

    def release(self) -> None:
        """Free the buffers that are kept for later calls; what was compiled stays."""
        model = None if self._model is None else self._model()
        if model is not None:
            for rows in self.batch_sizes:
                release_buffers(model, StaticSize(rows, self.max_cache_len))


def warmup(
    model: PreTrainedModel,
    *,
    max_cache_len: int,
    batch_sizes: Sequence[int] = (1,),
    compile_config: CompileConfig | None = None,
    progress: bool = True,
) -> Warmup:
    """Compile the decode steps of ``"prefix-static"`` ahead, and keep their buffers.

    Later calls of ``generate`` with the same ``max_cache_len`` and ``compile_config`` compile nothing, whatever their
    prefix, prompt length and ``max_new_tokens``, in batches of ``batch_sizes`` rows or fewer. Their buffers stay at
    the same addresses, so that CUDA graphs stay valid, until `Warmup.release` or until the model is dropped.

    Args:
        model: The model.
        max_cache_len: Tokens that each row may grow to, prompt and new ones.
        batch_sizes: Rows of the batches to come; a smaller batch runs in the next larger size, with its cost.
        compile_config: As for ``generate``. On a CPU, Transformers compiles only where its attribute
            ``_compile_all_devices`` is set.
        progress: Show a progress bar.

    Returns:
        What was compiled.

    Raises:
        CacheCapacityError: ``max_cache_len`` is too small to decode anything.
        BatchSizeError: No batch size, or one below 1.
        UnsupportedModelError: Transformers does not compile decoding for this model where it is.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM
        >>> sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
        >>> compiling = CompileConfig(backend="eager", fullgraph=False, mode=None)
        >>> compiling._compile_all_devices = True
        >>> hpc.warmup(model, max_cache_len=64, compile_config=compiling, progress=False).graphs
        1
    """
    if max_cache_len < _PROMPT + _NEW:
        raise CacheCapacityError(
            f"max_cache_len is {max_cache_len}; warming up takes at least {_PROMPT + _NEW} tokens"
        )
    if not batch_sizes or min(batch_sizes) < 1:
        raise BatchSizeError(f"batch_sizes is {tuple(batch_sizes)}; name at least one, each 1 or more")
    if not will_compile(model, GenerationConfig(compile_config=compile_config)):
        raise UnsupportedModelError(
            f"Transformers does not compile the decoding of {type(model).__name__} on {model.device.type}, so there "
            "is nothing to warm up; on a CPU, pass a compile_config whose attribute _compile_all_devices is True"
        )
    from tqdm.auto import tqdm

    generate: Any = model.generate
    before, start = _graphs(), time.perf_counter()
    sizes = sorted(set(batch_sizes))
    for rows in tqdm(sizes, desc="compiling", unit="batch size", disable=not progress):
        keep_buffers(model, StaticSize(rows, max_cache_len))
        ids = torch.ones(rows, _PROMPT, dtype=torch.long, device=model.device)
        generate(
            ids,
            attention_mask=torch.ones_like(ids),
            cache_implementation="prefix-static",
            cache_config={"reuse": False},
            max_cache_len=max_cache_len,
            compile_config=compile_config,
            max_new_tokens=_NEW,
            min_new_tokens=_NEW,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            return_dict_in_generate=False,
        )
    return Warmup(tuple(sizes), max_cache_len, _graphs() - before, time.perf_counter() - start, weakref.ref(model))


def _graphs() -> int:
    """Return how many graphs this process has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
