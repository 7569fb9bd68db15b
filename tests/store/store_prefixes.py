"""Made-up prefixes whose every value says which tokens it was computed from, so that a wrong one cannot pass."""

import itertools
from collections.abc import Sequence

import torch
from transformers import Lfm2Config, LlamaConfig, MistralConfig, PreTrainedConfig

from hf_prefix_cache.layers import AttentionState, KeyValues, RecurrentState
from hf_prefix_cache.snapshot import PrefixSnapshot
from hf_prefix_cache.storage import storage_bytes
from hf_prefix_cache.store import PrefixStore

FULL = (None, None)
SLIDING = (8, 8)
MIXED = (4, None, 9)
RUNNING = ("running", None)
# Configurations of such layers; windows of different widths are nobody's, and cannot be loaded from a file.
CONFIGS: dict[tuple[int | str | None, ...], PreTrainedConfig] = {
    FULL: LlamaConfig(vocab_size=1000, num_hidden_layers=2),
    SLIDING: MistralConfig(vocab_size=1000, num_hidden_layers=2, sliding_window=8),
    MIXED: LlamaConfig(vocab_size=1000),
    RUNNING: Lfm2Config(vocab_size=1000, num_hidden_layers=2, layer_types=["conv", "full_attention"]),
}
TOKEN_BYTES = 4 * (2 * 3 + 2 * 2)  # of one token in one layer: 2 heads, keys of 3 and values of 2 float32
VOCABULARY = 1000


def key_values(tokens: Sequence[int], layer: int) -> KeyValues:
    """Return keys and values of ``tokens`` that depend on all tokens up to each, as a model's do."""
    sums = itertools.accumulate(tokens, lambda total, token: (total * 31 + token + 7) % 65_521, initial=1)
    marks = torch.tensor(list(sums)[1:], dtype=torch.float32)
    keys = marks[None, None, :, None] + torch.arange(6).reshape(1, 2, 1, 3) / 16 + layer / 4
    return KeyValues(keys.contiguous(), -keys[..., :2].contiguous())


def logits_after(tokens: Sequence[int]) -> torch.Tensor:
    """Return made-up next logits, ``[1, VOCABULARY]``."""
    return torch.arange(VOCABULARY)[None] + key_values(tokens, 0).keys[0, 0, -1, 0]


def make_state(tokens: Sequence[int], layer: int, kind: int | str | None, *, retained: int | None = None):
    """Return the state of a layer that attends fully (None), within a window (int), or keeps a running state."""
    held = key_values(tokens, layer)
    if kind == "running":
        state = held.keys[:, :, -1].clone()
        return RecurrentState(conv=(None,), recurrent=(state,), widths=(None,), length=len(tokens))
    first = 0 if kind is None else max(0, len(tokens) - (retained or kind))
    return AttentionState((held.slice(first, len(tokens)),), len(tokens), kind)


def make_snapshot(tokens: Sequence[int], kinds: Sequence[int | str | None] = FULL, **changes) -> PrefixSnapshot:
    """Return a snapshot of ``tokens`` with one layer for each of ``kinds``; ``logits=True`` gives it next logits."""
    retained = changes.pop("retained", None)
    given = {
        "layers": tuple(make_state(tokens, index, kind, retained=retained) for index, kind in enumerate(kinds)),
        "seq_length": len(tokens),
        "batch_size": 1,
        "strategy": "prefix-dynamic",
        "config": CONFIGS[tuple(kinds)],
        "input_ids": torch.tensor([list(tokens)]),
        "next_logits": logits_after(tokens) if changes.pop("logits", False) else None,
        "fingerprint": "model",
    }
    return PrefixSnapshot(**{**given, **changes})


def check_exact(found: PrefixSnapshot, tokens: Sequence[int], kinds: Sequence[int | str | None] = FULL) -> None:
    """Check that ``found`` is in every bit what a model would have computed for a prefix of ``tokens``."""
    length = found.seq_length
    prefix = list(tokens)[:length]
    assert found.input_ids.tolist() == [prefix]
    assert found.input_ids.dtype == torch.int64
    assert len(found.layers) == len(kinds)
    for index, (state, kind) in enumerate(zip(found.layers, kinds, strict=True)):
        assert state.length == length
        assert state.window == (None if kind == "running" else kind)
        assert state.can_crop_to(length)
        if kind == "running":
            assert torch.equal(state.recurrent[0], key_values(prefix, index).keys[:, :, -1])
            continue
        wanted = key_values(prefix, index).slice(state.first, length)
        for side in (0, 1):
            assert torch.equal(torch.cat([part[side] for part in state.segments], dim=-2), wanted[side])
    if found.next_logits is not None:
        assert torch.equal(found.next_logits, logits_after(prefix))


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many first tokens two lists have in common."""
    return next(
        (i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), min(len(left), len(right))
    )


def longest_exact(stored: Sequence[PrefixSnapshot], tokens: Sequence[int]) -> int:
    """Return how long a prefix of ``tokens`` could be cropped exactly from one of ``stored``, tried one by one."""
    best = 0
    for snapshot in stored:
        shared = common(snapshot.input_ids[0].tolist(), tokens)
        best = max(best, next((m for m in range(shared, 0, -1) if snapshot.can_crop_to(m)), 0))
    return best


def held_tensors(store: PrefixStore) -> list[torch.Tensor]:
    """Return every tensor that ``store`` holds."""
    nodes = [
        node for layouts in store._memory.trees.values() for tree in layouts.values() for node in tree.root.downwards()
    ]
    tensors = [stack for node in nodes for block in node.blocks for stack in block.page.stacks]
    for node in nodes:
        if node.boundary is not None:
            tensors += [tensor for state in node.boundary.states for tensor in state.tensors()]
            tensors += [] if node.boundary.next_logits is None else [node.boundary.next_logits]
    return tensors


def held_bytes(store: PrefixStore) -> int:
    """Return the bytes of all storages that ``store`` holds, each counted once."""
    return storage_bytes(held_tensors(store))
