"""What processes do that write into one directory and are killed."""

import random
from pathlib import Path

from store_prefixes import make_snapshot

from hf_prefix_cache.store import PrefixStore

PROMPTS = [[start + index for index in range(40)] for start in range(0, 800, 40)]


def write_for_ever(folder: str, seed: int) -> None:
    """Write prefixes, into a store's directory and over one file of their own, until somebody ends this process."""
    rng = random.Random(seed)
    store = PrefixStore(max_bytes=10_000, directory=Path(folder) / "store", max_directory_bytes=10**9)
    single = [make_snapshot(prompt, logits=True) for prompt in PROMPTS[:2]]
    while True:
        store.insert(make_snapshot(rng.choice(PROMPTS), fingerprint=f"model {rng.randrange(10**6)}", logits=True))
        rng.choice(single).save(Path(folder) / "single.safetensors")


def write_and_read(folder: str, seed: int, steps: int) -> None:
    """Write and read the same prefixes as other processes do at the same time."""
    from store_prefixes import check_exact

    rng = random.Random(seed)
    store = PrefixStore(max_bytes=5_000, directory=folder, max_directory_bytes=100_000)
    for _ in range(steps):
        prompt = rng.choice(PROMPTS)
        if rng.random() < 0.5:
            store.insert(make_snapshot(prompt))
        else:
            found = store.match(prompt, "model")
            if found is not None:
                check_exact(found, prompt)
    store.sanity_check()
    if store.stats().damaged_files:
        raise RuntimeError("a file of another process was taken for a damaged one")
