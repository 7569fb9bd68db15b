"""Compiled calls of ``generate`` on the CPU, and what they are compared with."""

import torch
from transformers import CompileConfig

from generation.oracles import generated

STATIC = {"cache_implementation": "prefix-static"}


def everywhere(backend="eager", *, dynamic=False):
    """Return a configuration that compiles on the CPU too, which Transformers allows as an attribute only."""
    config = CompileConfig(fullgraph=False, backend=backend, mode=None, dynamic=dynamic)
    config._compile_all_devices = True
    return config


def compare(model, prompt, *, config=None, **options):
    """Check a compiled call against the uncached one, and return its tokens."""
    plain = {name: value for name, value in options.items() if name not in ("max_cache_len", "cache_config")}
    output = generated(model, prompt, **STATIC, compile_config=config or everywhere(), **options)
    assert torch.equal(output, generated(model, prompt, **plain))
    return output
