"""What users reported of caches elsewhere, and what holds here. The numbers are those of huggingface/transformers."""

import copy

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument, output_cache
from hf_prefix_cache.exceptions import BatchSizeError, NotCroppableError
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS, WINDOW

STRATEGIES = ("prefix-dynamic", "prefix-static")
WITHOUT_WINDOWS = ("llama", "qwen3", "gpt2", "bloom")
WITH_WINDOWS = ("gemma3_text", "mistral", "gpt_oss", "llama4")


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return request.param


def new_cache(strategy, model):
    if strategy == "prefix-static":
        return hpc.PrefixStaticCache(config=model.config, max_cache_len=40)
    return hpc.PrefixDynamicCache(config=model.config)


def run(model, cache, ids, mask=None):
    """Logits of a raw forward on a cache, padded rows included."""
    inputs = cache.prepare_inputs(ids, mask)._asdict()
    return model(**inputs, **cache_argument(cache)).logits


def filled(strategy, model, ids):
    cache = new_cache(strategy, model)
    run(model, cache, ids)
    return cache


def exact(logits, expected):
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def checksum(holder):
    states = holder.layers if isinstance(holder, hpc.PrefixSnapshot) else [layer.state() for layer in holder.layers]
    return [float(tensor.double().sum()) for state in states for tensor in state.tensors()]


# -- copy, fork, mutate -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_32159_32681_32929_copies_forks_and_snapshots_work_after_a_prefill_with_gradients_on(strategy, name):
    model = TINY_MODELS[name]()
    text = torch.randint(1, 99, (1, 16))
    expected = model(input_ids=text).logits[:, 11:]
    assert expected.requires_grad
    cache = filled(strategy, model, text[:, :11])
    options = {"max_cache_len": 40} if strategy == "prefix-static" else {}
    for copied in (copy.deepcopy(cache), cache.fork(), cache.snapshot().to_cache(**options)):
        exact(run(model, copied, text[:, 11:]), expected)


@torch.no_grad()
def test_37078_a_snapshot_has_the_same_checksum_after_any_number_of_forwards(strategy):
    model = TINY_MODELS["gemma3_text"]()
    cache = filled(strategy, model, torch.randint(1, 99, (1, 11)))
    snapshot = cache.snapshot()
    before = checksum(snapshot)
    for use_cache in (True, False):
        for tokens in (1, 4, 9):
            cache.restore(snapshot)
            ids = torch.randint(1, 99, (1, tokens))
            model(input_ids=ids, use_cache=use_cache, **cache_argument(cache))
            model(input_ids=ids, use_cache=use_cache, **cache_argument(cache.fork()))
    assert checksum(snapshot) == before


@torch.no_grad()
def test_27546_24841_the_cache_that_generate_returns_goes_on_with_only_the_new_ids(strategy):
    model = TINY_MODELS["llama"]()
    prompt, more = torch.randint(1, 99, (1, 7)), torch.randint(1, 99, (1, 3))
    cache = new_cache(strategy, model)
    result = model.generate(
        prompt, max_new_tokens=5, do_sample=False, return_dict_in_generate=True, **cache_argument(cache)
    )
    assert output_cache(result) is cache
    last_and_more = torch.cat([result.sequences[:, cache.seq_length :], more], dim=1)
    whole = torch.cat([result.sequences, more], dim=1)
    exact(run(model, cache, last_and_more), model(input_ids=whole).logits[:, -last_and_more.shape[1] :])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "mistral", "llama4"])
def test_48509_48809_after_reset_the_length_is_0_and_the_next_use_is_exact(strategy, name):
    model = TINY_MODELS[name]()
    cache = filled(strategy, model, torch.randint(1, 99, (1, 13)))
    cache.reset()
    assert cache.seq_length == int(cache.get_seq_length()) == 0
    assert [cache.get_mask_sizes(2, layer)[1] for layer in range(len(cache.layers))] == [0] * len(cache.layers)
    text = torch.randint(1, 99, (1, 15))
    exact(run(model, cache, text), model(input_ids=text).logits)


# -- crop -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gemma3_text", "llama4"])
@pytest.mark.parametrize(
    ("argument", "left"), [(0, 3), (-1, 2), (-3, 0), (-5, NotCroppableError), (2, ValueError), (9, ValueError)]
)
def test_47433_47720_47977_crop_of_length_3_has_one_result_or_error_for_every_argument(strategy, name, argument, left):
    model = TINY_MODELS[name]()
    text = torch.randint(1, 99, (1, 9))
    cache = filled(strategy, model, text[:, :3])
    if isinstance(left, int):
        cache.crop(argument)
    else:
        with pytest.raises(left):
            cache.crop(argument)
        left = 3
    assert cache.seq_length == int(cache.get_seq_length()) == left
    exact(run(model, cache, text[:, left:]), model(input_ids=text).logits[:, left:])


@torch.no_grad()
@pytest.mark.parametrize("name", TINY_MODELS)
@pytest.mark.parametrize("tokens", [3, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW + 3])
def test_44893_45745_32946_crop_is_exact_or_refused_on_static_and_sliding_layers(strategy, name, tokens):
    model = TINY_MODELS[name]()
    text = torch.randint(1, 99, (1, tokens + 4))
    for removed in range(1, tokens):
        cache = filled(strategy, model, text[:, :tokens])
        if cache.can_crop_to(tokens - removed):
            cache.crop(-removed)
            ids = torch.cat([text[:, : tokens - removed], torch.randint(1, 99, (1, 3))], dim=1)
            exact(run(model, cache, ids[:, -3:]), model(input_ids=ids).logits[:, -3:])
        else:
            assert name in WITH_WINDOWS
            assert removed > 1
            assert tokens > WINDOW
            with pytest.raises(NotCroppableError):
                cache.crop(-removed)
            exact(run(model, cache, text[:, tokens:]), model(input_ids=text).logits[:, tokens:])


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_46629_47153_47447_snapshots_of_a_recording_cache_hold_what_assisted_decoding_undoes(name):
    model = TINY_MODELS[name]()
    text = torch.randint(1, 99, (1, 24))
    cache = filled("prefix-dynamic", model, text[:, :15])
    cache.activate_past_recording()
    run(model, cache, torch.cat([text[:, 15:16], torch.randint(1, 99, (1, 4))], dim=1))
    snapshot = cache.snapshot()
    for candidate in (cache, cache.fork(), snapshot.to_cache()):
        candidate.crop(-4)
        exact(run(model, candidate, text[:, 16:]), model(input_ids=text).logits[:, 16:])


# -- positions, masks, padding ----------------------------------------------------------------------------------------


def pad(suffixes, side):
    width = max(map(len, suffixes))
    ids, mask = torch.zeros(len(suffixes), width, dtype=torch.int64), torch.zeros(len(suffixes), width)
    for row, suffix in enumerate(suffixes):
        where = slice(0, len(suffix)) if side == "right" else slice(width - len(suffix), width)
        ids[row, where], mask[row, where] = torch.tensor(suffix), 1
    return ids, mask


def draw(*lengths):
    return [torch.randint(1, 99, (length,)).tolist() for length in lengths]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", WITHOUT_WINDOWS)
def test_34232_18104_a_batch_of_suffixes_of_mixed_lengths_on_one_prefix_is_exact_for_each_row(strategy, name, side):
    model = TINY_MODELS[name]()
    (prefix,), suffixes = draw(9), draw(1, 6, 3, 4)
    batch = filled(strategy, model, torch.tensor([prefix])).fork(batch_size=4)
    ids, mask = pad(suffixes, side)
    logits = run(model, batch, ids, mask)
    for row, suffix in enumerate(suffixes):
        exact(logits[row, mask[row].bool()], model(input_ids=torch.tensor([prefix + suffix])).logits[0, 9:])


@torch.no_grad()
@pytest.mark.parametrize("sides", [("left", "left"), ("left", "right"), ("right", "left")])
@pytest.mark.parametrize("name", WITHOUT_WINDOWS)
def test_3095_4368_every_pair_of_2_prefixes_and_3_suffixes_is_exact(name, sides):
    model = TINY_MODELS[name]()
    prefixes, suffixes = draw(5, 9), draw(1, 4, 2)
    cache = hpc.PrefixDynamicCache(config=model.config)
    run(model, cache, *pad(prefixes, sides[0]))
    cache.batch_repeat_interleave(3)
    ids, mask = pad(suffixes * 2, sides[1])
    logits = run(model, cache, ids, mask)
    for row, (prefix, suffix) in enumerate((prefix, suffix) for prefix in prefixes for suffix in suffixes):
        expected = model(input_ids=torch.tensor([prefix + suffix])).logits[0, len(prefix) :]
        exact(logits[row, mask[row].bool()], expected)
        exact(logits[row, mask[row].bool()].topk(5).values, expected.topk(5).values)


@torch.no_grad()
@pytest.mark.parametrize("name", TINY_MODELS)
def test_36151_38727_40906_a_cache_as_long_as_the_input_is_exact(strategy, name):
    model = TINY_MODELS[name]()
    text = torch.randint(1, 99, (1, 22))
    expected = model(input_ids=text).logits
    cache = filled(strategy, model, text[:, :11])
    exact(run(model, cache, text[:, 11:], torch.ones(1, 11)), expected[:, 11:])
    cache.crop(-1)  # a prompt that is wholly cached: its last token is fed again
    exact(run(model, cache, text[:, -1:]), expected[:, -1:])


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "llama4"])
def test_35707_37403_embeddings_on_a_cache_equal_ids(strategy, name):
    model = TINY_MODELS[name]()
    text = torch.randint(1, 99, (1, 16))
    cache = filled(strategy, model, text[:, :11])
    embeddings = model.get_input_embeddings()(text[:, 11:])
    logits = model(inputs_embeds=embeddings, **cache_argument(cache)).logits
    exact(logits, model(input_ids=text).logits[:, 11:])


# -- static -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_37394_35444_32657_smaller_batches_run_on_a_static_cache_and_larger_ones_are_refused():
    model = TINY_MODELS["gemma3_text"]()
    cache = hpc.PrefixStaticCache(config=model.config, max_cache_len=40, max_batch_size=3)
    for rows in (2, 1, 3):
        cache.reset()
        text = torch.randint(1, 99, (rows, 13))
        exact(run(model, cache, text), model(input_ids=text).logits)
    cache.reset()
    with pytest.raises(BatchSizeError, match="max_batch_size=4"):
        run(model, cache, torch.randint(1, 99, (4, 3)))


# -- sliding ----------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_WINDOWS)
@pytest.mark.parametrize("tokens", [WINDOW, WINDOW + 1, 3 * WINDOW, 4 * WINDOW - 1])
def test_38156_a_prefix_longer_than_the_window_is_exact(strategy, name, tokens):
    model = TINY_MODELS[name]()
    text = torch.randint(1, 99, (1, tokens + 6))
    expected = model(input_ids=text).logits
    cache = filled(strategy, model, text[:, :tokens])
    for position in range(tokens, tokens + 6):
        exact(run(model, cache, text[:, position : position + 1]), expected[:, position : position + 1])


@torch.no_grad()
@pytest.mark.parametrize("name", WITH_WINDOWS)
def test_mlx_lm_980_boundaries_inside_a_sliding_prefix_are_kept_by_snapshots_and_not_recomputed(strategy, name):
    model = TINY_MODELS[name]()
    text = torch.randint(1, 99, (1, 30))
    expected = model(input_ids=text).logits
    cache, boundaries = new_cache(strategy, model), []
    for position in range(0, 30, 6):
        run(model, cache, text[:, position : position + 6])
        boundaries.append(cache.snapshot())
    for snapshot in reversed(boundaries[:-1]):
        cache.restore(snapshot)
        exact(run(model, cache, text[:, snapshot.seq_length :]), expected[:, snapshot.seq_length :])


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2"])
def test_46190_linear_attention_split_at_any_token_equals_one_call(strategy, name):
    model = RECURRENT_MODELS[name]()
    text = torch.randint(1, 99, (1, 20))
    expected = model(input_ids=text, use_cache=False).logits
    for split in range(1, 20):
        cache = filled(strategy, model, text[:, :split])
        for continued in (cache.fork(), cache):
            logits = run(model, continued, text[:, split:])
            torch.testing.assert_close(logits, expected[:, split:], atol=1e-3, rtol=0)  # 0.125 was reported
