import gc
import random
import weakref

import numpy as np
import pytest
import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_prefix_cache.exceptions import UnsupportedModelError
from hf_prefix_cache.scoring import loglikelihood
from hf_prefix_cache.scoring.masks import TreeLayout, packed_attention, tree_layout
from hf_prefix_cache.scoring.tree_cache import TreeCache, TreeLayer
from scoring.models import PACKED


def keys_of(*values: float) -> torch.Tensor:
    return torch.tensor(values).view(1, 1, -1, 1)


def test_a_tree_layer_keeps_the_chosen_path_only() -> None:
    layer = TreeLayer(is_sliding=False)
    assert layer.update(keys_of(0, 1, 2, 3), keys_of(0, 1, 2, 3))[0].flatten().tolist() == [0, 1, 2, 3]
    assert layer.get_seq_length() == 0
    layer.advance(0, [slice(0, 2), slice(3, 4)])
    assert layer.keys.flatten().tolist() == [0, 1, 3]
    assert layer.update(keys_of(4, 5), keys_of(4, 5))[1].flatten().tolist() == [0, 1, 3, 4, 5]
    assert layer.get_mask_sizes(2) == (5, 0)
    layer.advance(1, [slice(1, 2)])
    assert layer.values.flatten().tolist() == [0, 5]
    before = layer.keys
    layer.update(keys_of(6), keys_of(6))
    layer.advance(2, [])
    assert layer.keys is before
    layer.update(keys_of(7), keys_of(7))
    layer.advance(0, [])
    assert layer.get_seq_length() == 0


def test_paths_that_grow_and_shrink_in_the_same_room_hold_what_lists_hold() -> None:
    generator, layer, path, fed = random.Random(0), TreeLayer(is_sliding=False), [], 0
    rooms = set()
    for _ in range(200):
        new = [float(fed + place) for place in range(generator.randint(1, 12))]
        fed += len(new)
        keys, values = layer.update(keys_of(*new), -keys_of(*new))
        assert keys.flatten().tolist() == (-values).flatten().tolist() == path + new
        rooms.add(keys.untyped_storage().data_ptr())
        cuts = sorted(generator.choices(range(len(new) + 1), k=4))
        added = [slice(*pair) for pair in (cuts[:2], cuts[2:]) if pair[0] < pair[1]]
        kept = generator.randint(0, len(path))
        layer.advance(kept, added)
        path = path[:kept] + [value for stretch in added for value in new[stretch]]
        assert layer.get_seq_length() == len(path)
        if path:
            assert layer.keys.flatten().tolist() == (-layer.values).flatten().tolist() == path
    assert len(rooms) < 100


def test_nothing_of_a_chunk_stays_alive_through_what_is_kept_of_it() -> None:
    layer = TreeLayer(is_sliding=False)
    chunk = keys_of(*range(100))
    layer.update(chunk, chunk)
    layer.advance(0, [slice(0, 2)])
    assert layer.keys.untyped_storage().nbytes() < 10 * 4
    gone = weakref.ref(chunk)
    del chunk
    gc.collect()
    assert gone() is None


def test_peak_memory_is_one_chain_and_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, original = [], TreeCache.advance

    def advance(cache: TreeCache, kept: int, added: list[slice]) -> None:
        original(cache, kept, added)
        lengths.append(cache.layers[0].get_seq_length())

    monkeypatch.setattr(TreeCache, "advance", advance)
    root = list(range(3, 33))
    requests = [([*root, a, a + 1], [b, b + 1]) for a in range(40, 80) for b in (50, 60)]
    loglikelihood(PACKED["llama"](), requests, max_batch_tokens=16, progress=False, self_check=False)
    assert len(lengths) > 10
    assert max(lengths) <= len(root) + 3


def test_a_mask_of_another_size_is_refused() -> None:
    nodes = torch.arange(3)
    layout = TreeLayout(nodes, nodes, nodes, nodes, nodes + 1)
    with packed_attention("sdpa"), tree_layout(layout):
        build = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        assert build(batch_size=1, q_length=3, kv_length=3, mask_function=lambda b, h, q, k: k <= q).sum() == 3
        with pytest.raises(UnsupportedModelError, match=r"asked for a mask of .* \(2, 3, 3\)"):
            build(batch_size=2, q_length=3, kv_length=3, mask_function=lambda b, h, q, k: k <= q)


def test_mask_interfaces_are_put_back_when_the_last_user_leaves() -> None:
    before = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    with packed_attention("sdpa"):
        wrapped = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
        assert wrapped is not before
        with packed_attention("sdpa"):
            assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is wrapped
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is wrapped
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is before
    assert "sdpa" not in ALL_MASK_ATTENTION_FUNCTIONS._local_mapping


def test_each_token_of_the_tree_is_fed_once() -> None:
    model = PACKED["llama"]()
    fed: list[int] = []
    model.model.embed_tokens.register_forward_hook(lambda module, args, output: fed.append(args[0].numel()))
    root = list(range(3, 23))
    requests = [([*root, token], [token, other, 9]) for token in (30, 31) for other in (40, 41)]
    loglikelihood(model, requests, max_batch_tokens=8, progress=False, self_check=False)
    assert sum(fed) == 20 + 2 * (2 + 2)
    assert max(fed) <= 8


def test_logits_are_computed_where_they_are_asked_for_only() -> None:
    model = PACKED["llama"]()
    rows: list[int] = []
    model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    requests = [(list(range(3, 43)), [50, 51]), (list(range(3, 43)), [60, 61])]
    loglikelihood(model, requests, max_batch_tokens=512, progress=False, self_check=False)
    assert rows == [3]  # the end of the context, and the first token of each continuation
    assert np.sum(rows) < 40


def test_an_interface_that_a_user_put_in_place_is_there_again_afterwards() -> None:
    registered = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]

    def own(*args: object, **kwargs: object) -> object:
        return registered(*args, **kwargs)

    ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] = own
    try:
        loglikelihood(PACKED["llama"](), [([3, 4], [5, 6]), ([3, 4], [7])], progress=False)
        assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is own
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    assert ALL_MASK_ATTENTION_FUNCTIONS["sdpa"] is registered
