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
from .compiled import compile_config_of, will_compile
from .static_sizes import StaticSize, begin_steps, keep_buffers, release_buffers
from .steps import reaches_of

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
        read_lengths: Places of the buffers that steps read; each reads the fewest of these that hold its tokens.
        graphs: Graphs that were compiled.
        seconds: How long it took.

    Example:
        >>> Warmup(batch_sizes=(1, 4), max_cache_len=512, read_lengths=(512,), graphs=2, seconds=40.0).batch_sizes
        (1, 4)
    """

    batch_sizes: tuple[int, ...]
    max_cache_len: int
    read_lengths: tuple[int, ...]
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

    From a ``max_cache_len`` of 1,024 on, each decode step of such calls attends to as much of the buffers as its
    tokens need: an eighth (from 2,048 on), a half or all. Each is a graph that is compiled here, for every batch size.
    Calls that were not warmed up, of another length or with another ``compile_config``, read all of the buffers, so
    that they too are compiled once only.

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
    reaches = reaches_of(model.config, max_cache_len)  # or why the model has no static buffers
    config = compile_config_of(model, compile_config or getattr(model.generation_config, "compile_config", None))
    if not will_compile(model, GenerationConfig(compile_config=config)):
        raise UnsupportedModelError(
            f"Transformers does not compile the decoding of {type(model).__name__} on {model.device.type}, so there "
            "is nothing to warm up; on a CPU, pass a compile_config whose attribute _compile_all_devices is True"
        )
    from tqdm.auto import tqdm

    before, start = _graphs(), time.perf_counter()
    sizes = sorted(set(batch_sizes))
    with tqdm(total=len(sizes) * len(reaches), desc="compiling", unit="step", disable=not progress) as bar:
        for size in (StaticSize(rows, max_cache_len) for rows in sizes):
            keep_buffers(model, size)
            steps = begin_steps(model, size, config)
            try:
                for reach in reaches:
                    if reach < max_cache_len:
                        steps.add(reach)  # the shortest so far, so that it is what these few tokens go by
                    _decode(model, size, config)
                    bar.update()
            except BaseException:
                steps.reaches = ()
                release_buffers(model, size)
                raise
    seconds = time.perf_counter() - start
    return Warmup(tuple(sizes), max_cache_len, reaches[::-1], _graphs() - before, seconds, weakref.ref(model))


def _decode(model: PreTrainedModel, size: StaticSize, config: CompileConfig) -> None:
    """Run a few steps of all rows in buffers of ``size``."""
    generate: Any = model.generate
    ids = torch.ones(size.rows, _PROMPT, dtype=torch.long, device=model.device)
    generate(
        ids,
        attention_mask=torch.ones_like(ids),
        cache_implementation="prefix-static",
        cache_config={"reuse": False},
        max_cache_len=size.length,
        compile_config=config,
        max_new_tokens=_NEW,
        min_new_tokens=_NEW,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        return_dict_in_generate=False,
    )


def _graphs() -> int:
    """Return how many graphs this process has compiled so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
