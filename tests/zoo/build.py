"""A tiny random instance of every architecture that Transformers lists for causal language modelling."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .overrides import NOT_BUILT, OVERRIDES
from .shrink import shrunk_config

__all__ = ["ARCHITECTURES", "CannotBuildError", "build_architecture"]

ARCHITECTURES: tuple[str, ...] = tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
"""Names of all configurations in Transformers' mapping."""

MAX_PARAMETERS = 5_000_000
SECONDS = 30
# What is left as the architecture has it, in turn, where the usual sizes do not agree with each other.
_ATTEMPTS: tuple[tuple[str, ...], ...] = (
    (),
    ("num_key_value_heads", "num_kv_heads"),
    ("head_dim",),
    ("rotary_dim",),
    ("intermediate_size",),
    ("layer_types", "layers_block_type", "block_types", "mlp_layer_types"),
)


class CannotBuildError(Exception):
    """No tiny instance; the message says why."""


def build_architecture(model_type: str, *, seed: int = 0) -> PreTrainedModel:
    """Build a tiny model, float32, seeded, in evaluation mode, that has run once.

    Raises:
        CannotBuildError: The architecture cannot be built, or not this small.
    """
    if model_type in NOT_BUILT:
        raise CannotBuildError(NOT_BUILT[model_type])
    failures: list[str] = []
    for skip in _ATTEMPTS if model_type not in OVERRIDES else ((),):
        try:
            with _time_limit(SECONDS):
                return _build(shrunk_config(model_type, OVERRIDES.get(model_type), skip=skip), seed)
        except Exception as error:  # configurations and modeling files raise errors of every kind
            failures.append(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    raise CannotBuildError(failures[0])


def _build(config: Any, seed: int) -> PreTrainedModel:
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > MAX_PARAMETERS:
        raise CannotBuildError(f"it has {parameters / 1e6:.1f} million parameters with the smallest sizes found")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            logits = model(input_ids=torch.randint(3, 99, (1, 20)), use_cache=False).logits
    if not bool(torch.isfinite(logits).all()):
        raise CannotBuildError("its logits are not finite")
    return model


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"it took longer than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
