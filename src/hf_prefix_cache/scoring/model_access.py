"""What scoring asks of a model, whatever wraps it, and leaving it as it was found."""

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..compat import decoder_config

__all__ = [
    "evaluation_mode",
    "forward_accepts",
    "free_bytes",
    "innermost_model",
    "input_device",
    "length_limit",
    "prefix_token",
    "uncompiled_model",
    "uses_virtual_tokens",
]

_LIMITS = ("n_positions", "max_position_embeddings", "n_ctx")  # in the order lm-evaluation-harness looks
_locks: "weakref.WeakKeyDictionary[torch.nn.Module, Any]" = weakref.WeakKeyDictionary()
_locks_guard = threading.Lock()


def uncompiled_model(model: Any) -> Any:
    """Return the model inside `torch.compile`, which would recompile for every new chunk length."""
    return getattr(model, "_orig_mod", model)


def innermost_model(model: Any) -> Any:
    """Return the Transformers model inside PEFT's wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def uses_virtual_tokens(model: Any) -> bool:
    """Tell whether PEFT puts learned tokens before every input, as prompt and prefix tuning do."""
    return bool(getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False))


def forward_accepts(model: Any, name: str) -> bool:
    """Tell whether the model's ``forward`` has a parameter ``name``."""
    return name in inspect.signature(innermost_model(model).forward).parameters


def input_device(model: Any) -> torch.device:
    """Return the device on which the model takes token ids."""
    embeddings = model.get_input_embeddings()
    hook = getattr(embeddings, "_hf_hook", None)
    if hook is not None and getattr(hook, "execution_device", None) is not None:
        # Offloaded weights lie on the meta device between calls.
        return torch.device(hook.execution_device)
    return embeddings.weight.device


def length_limit(config: PreTrainedConfig) -> int | None:
    """Return how many tokens a model is made to read at once, or None if its configuration does not say."""
    decoder = decoder_config(config)
    limits = (getattr(decoder, name, None) for name in _LIMITS)
    return next((int(limit) for limit in limits if limit and limit > 0), None)  # XLNet says -1


def prefix_token(config: PreTrainedConfig) -> int | None:
    """Return the beginning-of-text token or else the end-of-text token that a configuration names."""
    for part in (config, decoder_config(config)):
        for name in ("bos_token_id", "eos_token_id"):
            token = getattr(part, name, None)
            if token is not None:
                return int(token[0] if isinstance(token, (list, tuple)) else token)
    return None


def free_bytes(device: torch.device) -> int:
    """Return the memory that is free on ``device``."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as file:
            available = next(line for line in file if line.startswith("MemAvailable"))
        return int(available.split()[1]) * 1024
    except (OSError, StopIteration):
        return 2**32  # a machine that does not tell is taken to have a few gigabytes


@contextmanager
def evaluation_mode(model: torch.nn.Module) -> Iterator[None]:
    """Hold the model for this thread alone, without dropout and gradients; every module's mode is put back.

    The flags are set one by one, since `torch.nn.Module.eval` may be overridden to do more than that, and modules of
    one model may differ in mode.
    """
    with _locks_guard:
        lock = _locks.setdefault(model, threading.RLock())
    with lock:
        training = [module for module in model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            with torch.no_grad():
                yield
        finally:
            for module in training:
                module.training = True
