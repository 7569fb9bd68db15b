"""What quantized prefixes take and lose: the measurements of ``hf-prefix-cache bench memory``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..caches import PrefixCache, PrefixDynamicCache, PrefixQuantizedCache
from ..compat import cache_argument, decoder_config
from ..exceptions import MissingPackageError
from ..snapshot import PrefixSnapshot
from ._console import CommandError

__all__ = [
    "FORMATS",
    "ExactPrefix",
    "MemoryBench",
    "QuantizedPrefix",
    "draw",
    "read_ids",
    "run_memory_bench",
    "step_count",
]

FORMATS: dict[str, dict[str, Any]] = {
    "bitsandbytes, 8 bits": {"nbits": 8},
    "bitsandbytes, nf4": {"nbits": 4, "quant_type": "nf4"},
    "bitsandbytes, fp4": {"nbits": 4, "quant_type": "fp4"},
    "hqq, 8 bits": {"backend": "hqq", "nbits": 8},
    "hqq, 4 bits": {"backend": "hqq", "nbits": 4},
    "hqq, 3 bits": {"backend": "hqq", "nbits": 3},
    "hqq, 2 bits": {"backend": "hqq", "nbits": 2},
}
_CHUNK = 256  # tokens of a forward: bounds the memory that logits of a large vocabulary take
_GREEDY = 64


@dataclass(frozen=True)
class ExactPrefix:
    """What the prefix takes as it is, and what the model makes of the text behind it."""

    nbytes: int
    perplexity: float
    seconds_per_token: float


@dataclass(frozen=True)
class QuantizedPrefix:
    """The same for a quantized prefix, with what it gives up.

    Attributes:
        name: Backend and format.
        nbytes: Bytes of the prefix, its exact tokens and all scales included.
        bits_per_value: Bits of a quantized key or value, scales included.
        perplexity: Of the text behind the prefix, with own tokens exact.
        greedy_agreement: How many of the first greedy tokens are those of the exact model.
        error_of_keys: Largest relative error of a layer's keys.
        error_of_values: The same for values.
        seconds_to_quantize: Seconds that quantizing the prefix took.
        seconds_per_token: Seconds of a greedy token.
    """

    name: str
    nbytes: int
    bits_per_value: float
    perplexity: float
    greedy_agreement: int
    error_of_keys: float
    error_of_values: float
    seconds_to_quantize: float
    seconds_per_token: float


@dataclass(frozen=True)
class MemoryBench:
    """All results, and which formats were left out and why."""

    model: str
    dtype: str
    device: str
    prefix_tokens: int
    scored_tokens: int
    greedy_tokens: int
    exact: ExactPrefix
    quantized: tuple[QuantizedPrefix, ...]
    left_out: tuple[str, ...]


def step_count() -> int:
    """Return how often `run_memory_bench` calls ``step``."""
    return 1 + len(FORMATS)


def read_ids(text: Path, model: Any, tokenizer: Any, *, prefix: int, tokens: int) -> torch.Tensor:
    """Return the first ``prefix + tokens + 1`` token ids of a file.

    Raises:
        CommandError: The text or the model is too short for that.
    """
    limit = getattr(decoder_config(model.config), "max_position_embeddings", None)
    if limit is not None and prefix + tokens > limit:
        raise CommandError(
            f"prefix and tokens are {prefix} and {tokens}, together more than the {limit} tokens that the model takes"
        )
    wanted = prefix + tokens + 1
    try:
        words = text.read_text(encoding="utf-8")[: 16 * wanted]
    except UnicodeDecodeError as error:
        raise CommandError(f"text is {str(text)!r}, which is not text in UTF-8") from error
    ids = tokenizer(words, add_special_tokens=False).input_ids[:wanted]
    if len(ids) < wanted:
        raise CommandError(
            f"text has {len(ids)} tokens and {wanted} are needed; name a longer text, or pass a smaller --prefix or "
            "--tokens"
        )
    return torch.tensor(ids)


@torch.inference_mode()
def run_memory_bench(model: Any, ids: torch.Tensor, *, prefix: int, step: Callable[[str], None]) -> MemoryBench:
    """Measure every format whose package is installed.

    Args:
        model: The model.
        ids: Token ids ``[tokens]`` of the prefix and what follows.
        prefix: How many of them are the prefix.
        step: Called before each part with what it does.
    """
    step("Computing the prefix")
    cache = PrefixDynamicCache(config=model.config)
    for chunk in ids[:prefix].split(_CHUNK):
        logits = _feed(model, chunk, cache)
    exact = cache.snapshot().compact()
    first = int(logits[-1].argmax())
    following = ids[prefix:]
    expected, seconds = _greedy(model, cache.fork(), first)
    found = ExactPrefix(exact.nbytes, _perplexity(model, cache, following), seconds)
    quantized, left_out = [], []
    for name, options in FORMATS.items():
        step(name)
        try:
            quantized.append(_measure(model, exact, following, name, options, first, expected))
        except MissingPackageError as error:
            left_out.append(f"{name}: {error}")
    return MemoryBench(
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        prefix_tokens=prefix,
        scored_tokens=len(following) - 1,
        greedy_tokens=_GREEDY,
        exact=found,
        quantized=tuple(quantized),
        left_out=tuple(left_out),
    )


def draw(results: MemoryBench, path: Path) -> None:
    """Draw bytes of the prefix against the change of perplexity.

    Raises:
        MissingPackageError: Matplotlib is not installed.
        CommandError: The file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingPackageError("--png draws with matplotlib; run 'pip install matplotlib'") from error
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for entry in results.quantized:
        place = (
            entry.nbytes / results.exact.nbytes,
            100 * (entry.perplexity / results.exact.perplexity - 1),
        )
        axes.scatter(*place, s=40)
        axes.annotate(entry.name, place, xytext=(6, 4), textcoords="offset points", fontsize=8)
    axes.axhline(0, color="black", linewidth=0.7)
    axes.set_yscale("symlog", linthresh=0.5)
    axes.margins(x=0.2)
    axes.set_xlabel(f"bytes of the {results.prefix_tokens:,}-token prefix / {results.dtype}'s")
    axes.set_ylabel(f"change of perplexity, % ({results.scored_tokens:,} tokens)")
    axes.set_title(results.model)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise CommandError(f"png is {str(path)!r}, which cannot be written: {error}") from error


def _measure(
    model: Any,
    exact: PrefixSnapshot,
    following: torch.Tensor,
    name: str,
    options: dict[str, Any],
    first: int,
    expected: list[int],
) -> QuantizedPrefix:
    options = {**options, "quantize_own": False}
    PrefixQuantizedCache(config=model.config, **options)  # tries the backend out, which takes time once
    start = time.perf_counter()
    cache: Any = exact.to_cache("prefix-quantized", **options)
    seconds = time.perf_counter() - start
    report = cache.report()
    tokens, seconds_per_token = _greedy(model, cache.fork(), first)
    pairs = enumerate(zip(tokens, expected, strict=True))
    return QuantizedPrefix(
        name=name,
        nbytes=report.nbytes,
        bits_per_value=report.bits_per_value,
        perplexity=_perplexity(model, cache, following),
        greedy_agreement=next((place for place, (ours, theirs) in pairs if ours != theirs), _GREEDY),
        error_of_keys=max(report.error.keys),
        error_of_values=max(report.error.values),
        seconds_to_quantize=seconds,
        seconds_per_token=seconds_per_token,
    )


def _feed(model: Any, ids: torch.Tensor, cache: PrefixCache) -> torch.Tensor:
    logits: torch.Tensor = model(ids[None].to(model.device), **cache_argument(cache)).logits[0]
    return logits


def _perplexity(model: Any, cache: PrefixCache, ids: torch.Tensor) -> float:
    """Return the perplexity of ``ids[1:]``; ``ids[0]`` is fed behind what ``cache`` holds."""
    loss = 0.0
    for chunk, labels in zip(ids[:-1].split(_CHUNK), ids[1:].split(_CHUNK), strict=True):
        logprobs = _feed(model, chunk, cache).float().log_softmax(-1)
        loss -= float(logprobs.gather(1, labels.to(logprobs.device)[:, None]).sum())
    return math.exp(loss / (len(ids) - 1))


def _greedy(model: Any, cache: PrefixCache, first: int) -> tuple[list[int], float]:
    """Return greedy tokens from ``first`` on, and the seconds of one."""
    tokens = [first]
    start = time.perf_counter()
    while len(tokens) < _GREEDY:
        tokens.append(int(_feed(model, torch.tensor(tokens[-1:]), cache)[-1].argmax()))
    return tokens, (time.perf_counter() - start) / (_GREEDY - 1)
