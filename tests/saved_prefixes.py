"""Prefixes of every strategy and layer kind as files, and what follows from them: run in one process or in two."""

import sys
from pathlib import Path

import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.architectures import runs_on_static_caches
from hf_prefix_cache.compat import takes_cache
from hf_prefix_cache.forward import feed
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

MODELS = {**TINY_MODELS, **{name: RECURRENT_MODELS[name] for name in ("mamba2", "falcon_h1", "lfm2", "qwen3_next")}}
STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-quantized", "prefix-offloaded")
PREFIX, SUFFIX = 150, 7


def tokens(count: int, seed: int) -> torch.Tensor:
    return torch.randint(1, 99, (1, count), generator=torch.Generator().manual_seed(seed))


def is_served(model, strategy: str) -> bool:
    """Return whether this Transformers release runs ``model`` on caches of ``strategy``."""
    return takes_cache(model) and (strategy != "prefix-static" or runs_on_static_caches(model))


def make_prefix(model, strategy: str, length: int = PREFIX) -> hpc.PrefixSnapshot:
    """Return a complete snapshot of ``length`` tokens, filled by ``strategy``."""
    ids = tokens(length, 1)
    made = {
        "prefix-dynamic": lambda: hpc.PrefixDynamicCache(config=model.config),
        "prefix-static": lambda: hpc.PrefixStaticCache(config=model.config, max_cache_len=length + 30),
        "prefix-quantized": lambda: hpc.PrefixQuantizedCache(config=model.config),
        "prefix-offloaded": lambda: hpc.PrefixOffloadedCache(config=model.config),
    }
    cache = made[strategy]()
    with torch.no_grad():
        logits = feed(model, ids, cache)
    return cache.snapshot(model=model, input_ids=ids, next_logits=logits)


def continuation(model, snapshot: hpc.PrefixSnapshot) -> torch.Tensor:
    """Return logits of a suffix behind ``snapshot``, in the strategy that filled it."""
    options = {"max_cache_len": snapshot.seq_length + 30} if snapshot.strategy == "prefix-static" else {}
    with torch.no_grad():
        return feed(model, tokens(SUFFIX, 2), snapshot.to_cache(**options))


def load_and_continue(folder: Path) -> None:
    """Continue every file in ``folder`` and save the logits beside it."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        model = MODELS[path.name.partition("+")[0]]()
        found[path.name] = continuation(model, hpc.PrefixSnapshot.load(path, model=model))
    torch.save(found, folder / "found.pt")


if __name__ == "__main__":
    load_and_continue(Path(sys.argv[1]))
