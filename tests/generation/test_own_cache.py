"""``generate`` on a prefix cache that the caller passes: complete prompts or new tokens, with or without a mask."""

import gc
import weakref

import pytest
import torch

import hf_prefix_cache as hpc
from generation.oracles import (
    COMBINATIONS,
    FULL_ATTENTION,
    NEW_TOKENS,
    STRATEGIES,
    WINDOWED,
    counted,
    generated,
    pad_left,
    tokens,
)
from hf_prefix_cache.compat import CACHE_ARGUMENT, cache_argument
from zoo.build import build_architecture

everywhere = pytest.mark.parametrize(("name", "strategy"), COMBINATIONS)
ROOM = 64


def new_cache(model, strategy, rows=None):
    if strategy == "prefix-static":
        return hpc.PrefixStaticCache(config=model.config, max_cache_len=ROOM, max_batch_size=rows)
    return hpc.PrefixDynamicCache(config=model.config)


def filled(model, ids, strategy, *, knows=True, attention_mask=None):
    cache = new_cache(model, strategy)
    with torch.no_grad():
        model(ids, attention_mask=attention_mask, **cache_argument(cache))
    if knows:
        cache.known_ids = ids
    return cache


def continued(model, ids, cache, **options):
    """Return the new tokens alone, since ids passed may be complete or not, and the tokens that were fed."""
    with counted(model) as count:
        output = generated(model, ids, **cache_argument(cache), **options)
    return output[:, ids.shape[1] :], count


def uncached(model, ids, **options):
    return generated(model, ids, **options)[:, ids.shape[1] :]


@everywhere
@pytest.mark.parametrize("knows", [True, False])
def test_complete_prompts_behind_what_is_cached(name, strategy, knows, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 20)
    cache = filled(model, prompt[:, :13], strategy, knows=knows)
    output, count = continued(model, prompt, cache)
    assert torch.equal(output, uncached(model, prompt))
    assert count.calls[0] == 7
    assert hpc.last_report(model).reused_tokens == 13


@everywhere
def test_new_tokens_with_a_mask_over_all(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 20)
    for knows in (True, False):
        cache = filled(model, prompt[:, :13], strategy, knows=knows)
        output, count = continued(model, prompt[:, 13:], cache, attention_mask=torch.ones(1, 20, dtype=torch.long))
        assert torch.equal(output, uncached(model, prompt))
        assert count.calls[0] == 7


@everywhere
def test_new_tokens_without_a_mask_where_the_cache_knows_its_own(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 30)
    for new in (1, 5, 17):  # fewer than are cached, and more
        cache = filled(model, prompt[:, :12], strategy)
        output, count = continued(model, prompt[:, 12 : 12 + new], cache)
        assert torch.equal(output, uncached(model, prompt[:, : 12 + new]))
        assert count.calls[0] == new


@everywhere
@pytest.mark.parametrize("knows", [True, False])
def test_a_prompt_that_is_cached_whole(name, strategy, knows, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 20)
    cache = filled(model, prompt, strategy, knows=knows)
    output, count = continued(model, prompt, cache)
    assert torch.equal(output, uncached(model, prompt))
    assert count.calls[0] == 1


@pytest.mark.parametrize(("name", "strategy"), [pair for pair in COMBINATIONS if pair[0] in FULL_ATTENTION])
def test_a_cache_longer_than_the_prompt(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 20)
    output, _ = continued(model, prompt[:, :8], filled(model, prompt, strategy))
    assert torch.equal(output, uncached(model, prompt[:, :8]))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", WINDOWED)
def test_a_cache_longer_than_the_prompt_whose_window_has_moved_on(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 20)
    cache = filled(model, prompt, strategy)
    with pytest.raises(hpc.NotCroppableError, match="window"):
        continued(model, prompt[:, :8], cache)
    assert cache.seq_length == 20
    output, _ = continued(model, prompt, cache)  # and it works on
    assert torch.equal(output, uncached(model, prompt))


@everywhere
def test_the_cache_that_generate_returns_goes_back_in_with_the_next_turn(name, strategy, tiny_model):
    model, prompt, turn = tiny_model(name), tokens(1, 12), tokens(1, 6, seed=1)
    options = {"return_dict_in_generate": True, "max_cache_len": ROOM}
    for complete in (True, False):
        first = generated(model, prompt, cache_implementation=strategy, **options)
        following = torch.cat([first.sequences, turn], dim=1)
        passed = following if complete else following[:, first[CACHE_ARGUMENT].seq_length :]
        output, count = continued(model, passed, first[CACHE_ARGUMENT])
        assert torch.equal(output, uncached(model, following))
        assert count.calls[0] == 7  # the turn, and the last token of the answer
        # And once more, with what the first continuation left.
        third = torch.cat([following, output, turn], dim=1)
        again, _ = continued(model, third, first[CACHE_ARGUMENT])
        assert torch.equal(again, uncached(model, third))


@everywhere
def test_a_fresh_cache_is_filled_and_knows_its_tokens(name, strategy, tiny_model):
    model, prompt, turn = tiny_model(name), tokens(2, 12), tokens(2, 4, seed=1)
    cache = new_cache(model, strategy)
    output, _ = continued(model, prompt, cache)
    assert torch.equal(output, uncached(model, prompt))
    sequences = torch.cat([prompt, output], dim=1)
    assert torch.equal(cache.known_ids, sequences[:, :-1])
    following = torch.cat([sequences, turn], dim=1)
    output, count = continued(model, following, cache)
    assert torch.equal(output, uncached(model, following))
    assert count.calls[0] == 2 * 5


@pytest.mark.parametrize(("name", "strategy"), [pair for pair in COMBINATIONS if pair[0] in ("llama", "bloom")])
def test_a_padded_batch_that_came_from_the_store_goes_back_in(name, strategy, tiny_model):
    """The store puts the shared prefix first and the padding behind it: the cache must remember where."""
    model, prefix = tiny_model(name), tokens(10)
    ids, mask = pad_left(*(torch.cat([prefix, tokens(count, seed=count)]) for count in (6, 3)))
    options = {"attention_mask": mask, "return_dict_in_generate": True, "max_cache_len": ROOM}
    generated(model, prefix[None], cache_implementation=strategy)
    turn = tokens(2, 5, seed=9)
    for complete in (True, False):
        first = generated(model, ids, cache_implementation=strategy, **options)
        assert hpc.last_report(model).stored_tokens == 10
        following = torch.cat([first.sequences, turn], dim=1)
        full_mask = torch.cat([mask, mask.new_ones(2, NEW_TOKENS + 5)], dim=1)
        expected = uncached(model, following, attention_mask=full_mask)
        cache = first[CACHE_ARGUMENT]
        passed = following if complete else following[:, cache.seq_length :]
        output, count = continued(model, passed, cache.fork(), attention_mask=full_mask)
        assert torch.equal(output, expected)
        assert count.calls[0] == 2 * 6
        if not complete:
            output, _ = continued(model, passed, cache.fork())  # without a mask
            assert torch.equal(output, expected)
    with pytest.raises(hpc.InputMismatchError, match="row 1 differs from token 0 on"):
        continued(model, following, cache, attention_mask=torch.ones_like(full_mask))
    with pytest.raises(hpc.InputMismatchError, match="do not agree on how much of each row is padding"):
        continued(model, following[:, cache.seq_length :], cache, attention_mask=torch.ones_like(full_mask))
    # A prompt that is cached whole, and then a turn from there.
    output, _ = continued(model, first.sequences, cache, attention_mask=full_mask[:, :-5])
    assert torch.equal(output, uncached(model, first.sequences, attention_mask=full_mask[:, :-5]))


@everywhere
def test_a_left_padded_batch_on_a_cache_of_the_caller(name, strategy, tiny_model):
    model = tiny_model(name)
    ids, mask = pad_left(tokens(14), tokens(9, seed=1))
    cache = new_cache(model, strategy)
    output, _ = continued(model, ids, cache, attention_mask=mask)
    assert torch.equal(output, uncached(model, ids, attention_mask=mask))
    following = torch.cat([ids, output, tokens(2, 4, seed=2)], dim=1)
    full_mask = torch.cat([mask, mask.new_ones(2, following.shape[1] - ids.shape[1])], dim=1)
    expected = uncached(model, following, attention_mask=full_mask)
    assert torch.equal(continued(model, following, cache.fork(), attention_mask=full_mask)[0], expected)
    assert torch.equal(continued(model, following[:, cache.seq_length :], cache)[0], expected)


@everywhere
def test_embeddings_behind_a_cache(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 16)
    embeds = model.get_input_embeddings()(prompt).detach()
    expected = generated(model, inputs_embeds=embeds)
    for held in (11, 16):  # a part, and all of it
        cache = filled(model, prompt[:, :held], strategy)
        assert torch.equal(generated(model, inputs_embeds=embeds, **cache_argument(cache)), expected)
    cache = filled(model, prompt[:, :11], strategy)
    mask = torch.ones(1, 16, dtype=torch.long)
    output = generated(model, inputs_embeds=embeds[:, 11:], attention_mask=mask, **cache_argument(cache))
    assert torch.equal(output, expected)


@everywhere
def test_chunks_behind_a_cache(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 24)
    for passed in (prompt, prompt[:, 11:]):
        cache = filled(model, prompt[:, :11], strategy)
        output, count = continued(model, passed, cache, prefill_chunk_size=5)
        assert torch.equal(output, uncached(model, prompt, prefill_chunk_size=5))
        assert count.calls[:3] == [5, 5, 3]


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_forks_of_one_prefix_run_as_beams_and_samples(name, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 16)
    prefix = filled(model, prompt[:, :11], "prefix-dynamic")
    for options in ({"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}):
        output = generated(model, prompt, **cache_argument(prefix.fork(batch_size=3)), **options)
        assert torch.equal(output, generated(model, prompt, **options))
        with pytest.raises(hpc.BatchSizeError, match="fork the cache with batch_size=3"):
            generated(model, prompt, **cache_argument(prefix), **options)
    assert prefix.seq_length == 11
    assert torch.equal(prefix.known_ids, prompt[:, :11])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_drafts_behind_a_cache(strategy, tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 9).repeat(1, 3)
    for held in (20, 27):
        cache = filled(model, prompt[:, :held], strategy)
        output, count = continued(model, prompt, cache, prompt_lookup_num_tokens=3)
        assert torch.equal(output, uncached(model, prompt))
        assert count.calls[0] <= 27 - min(held, 26) + 3
    cache = filled(model, prompt[:, :20], strategy)
    other = tokens(1, 5, seed=4)
    with pytest.raises(hpc.UnsupportedModelError, match="new tokens alone were passed; pass complete prompts"):
        continued(model, other, cache, prompt_lookup_num_tokens=3)
    assert cache.seq_length == 20


def test_drafts_are_refused_on_static_running_states_however_often_the_buffers_were_used():
    model = build_architecture("lfm2")
    prompt = tokens(1, 9).repeat(1, 3)
    remedy = r"has running states, from which .*; use 'prefix-dynamic'"
    for is_used in (False, True):  # from the first forward on, Transformers calls convolutions croppable
        cache = filled(model, prompt[:, :20], "prefix-static") if is_used else new_cache(model, "prefix-static")
        with pytest.raises(hpc.UnsupportedModelError, match=remedy):
            continued(model, prompt, cache, prompt_lookup_num_tokens=3)
        assert torch.equal(continued(model, prompt, cache)[0], uncached(model, prompt))
    cache = filled(model, prompt[:, :20], "prefix-dynamic")
    output, _ = continued(model, prompt, cache, prompt_lookup_num_tokens=3)
    assert torch.equal(output, uncached(model, prompt))
    following = torch.cat([prompt, output, tokens(1, 4, seed=5)], dim=1)
    assert torch.equal(continued(model, following, cache)[0], uncached(model, following))


def test_ids_that_are_neither_a_prompt_nor_plainly_new_are_refused(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 20)
    cache = filled(model, prompt, "prefix-dynamic")
    diverging = torch.cat([prompt[:, :6], tokens(1, 20, seed=1)], dim=1)
    with pytest.raises(hpc.InputMismatchError, match=r"differs from token 6 on.*\[1, 46\].*crop_to\(6\)"):
        continued(model, diverging, cache)
    assert cache.seq_length == 20
    # Both remedies.
    output, _ = continued(model, diverging, cache.fork(), attention_mask=torch.ones(1, 46, dtype=torch.long))
    assert torch.equal(output, uncached(model, torch.cat([prompt, diverging], dim=1)))
    cache.crop_to(6)
    assert torch.equal(continued(model, diverging, cache)[0], uncached(model, diverging))


def test_ids_that_cannot_be_told_apart_are_refused(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 20)
    cache = filled(model, prompt, "prefix-dynamic", knows=False)
    with pytest.raises(hpc.InputMismatchError, match=r"was not told which, and input_ids has 4; pass attention_mask"):
        continued(model, prompt[:, :4], cache)
    for length in (3, 19, 25):
        with pytest.raises(hpc.InputMismatchError, match=f"attention_mask has {length} columns.*must have 4 .*or 24"):
            continued(model, prompt[:, :4], cache, attention_mask=torch.ones(1, length, dtype=torch.long))
    assert cache.seq_length == 20
    assert torch.equal(continued(model, prompt, cache)[0], uncached(model, prompt))


def test_what_does_not_fit_a_static_cache_is_refused_before_anything_runs(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 20)
    cache = filled(model, prompt, "prefix-static")
    following = torch.cat([prompt, tokens(1, 30, seed=1)], dim=1)
    for passed in (following, following[:, 20:]):
        with counted(model) as count, pytest.raises(hpc.CacheCapacityError, match="max_cache_len 64"):
            continued(model, passed, cache, max_new_tokens=16)
        assert count.calls == []
        assert cache.seq_length == 20
    output, _ = continued(model, following, cache, max_new_tokens=15)  # exactly full
    assert torch.equal(output, uncached(model, following, max_new_tokens=15))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cache_of_other_rows_is_refused(strategy, tiny_model):
    model, prompts = tiny_model("llama"), tokens(3, 12)
    cache = filled(model, prompts[:2, :8], strategy)
    for rows in (1, 3):
        with pytest.raises(hpc.BatchSizeError, match=r"max_batch_size=3|the batch has"):
            continued(model, prompts[:rows], cache)
    assert (cache.rows, cache.seq_length) == (2, 8)
    assert torch.equal(continued(model, prompts[:2], cache)[0], uncached(model, prompts[:2]))


class Interrupts:
    """A streamer that raises at the first new token."""

    def put(self, value):
        if value.numel() == 1:
            raise KeyboardInterrupt

    def end(self):
        pass


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_after_an_interruption_what_the_cache_was_not_told_is_fed_again(strategy, tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 12)
    cache = filled(model, prompt[:, :8], strategy)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            continued(model, prompt, cache, streamer=Interrupts())
    assert (cache.seq_length, cache.known_ids.shape[1]) == (12, 8)
    other = torch.cat([prompt[:, :8], tokens(1, 9, seed=1)], dim=1)  # not what the interrupted call has fed
    output, count = continued(model, other, cache)
    assert torch.equal(output, uncached(model, other))
    assert count.calls[0] == 9


def test_a_window_that_was_interrupted_is_refused(tiny_model):
    model, prompt = tiny_model("mistral"), tokens(1, 20)
    cache = filled(model, prompt[:, :8], "prefix-dynamic")
    with pytest.raises(KeyboardInterrupt):
        continued(model, prompt, cache, streamer=Interrupts())
    with pytest.raises(hpc.NotCroppableError, match="restore a snapshot"):
        continued(model, prompt, cache)


def test_a_forward_that_fails_half_way_is_noticed(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 12)
    cache = filled(model, prompt[:, :8], "prefix-dynamic")

    def fail(*_):
        raise RuntimeError("out of memory")

    handle = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        continued(model, prompt, cache)
    handle.remove()
    with pytest.raises(
        hpc.InputMismatchError, match=r"hold 8 to 12 tokens, since a forward on it has failed.*crop_to\(8\)"
    ):
        continued(model, prompt, cache)
    cache.crop_to(8)
    assert torch.equal(continued(model, prompt, cache)[0], uncached(model, prompt))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropping_the_last_reference_frees_the_tensors(strategy, tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 12)
    output = generated(model, prompt, cache_implementation=strategy, return_dict_in_generate=True)
    cache = output[CACHE_ARGUMENT]
    held = [weakref.ref(tensor) for layer in cache.layers for tensor in layer.tensors()]
    assert held
    del cache, output
    gc.collect()
    assert not [tensor for tensor in held if tensor() is not None]


def test_a_cache_goes_in_under_either_keyword_where_transformers_knows_both(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 20)
    for keyword in ("past_key_values", "cache"):
        cache = filled(model, prompt[:, :13], "prefix-dynamic")
        if keyword == CACHE_ARGUMENT or keyword == "past_key_values":
            assert torch.equal(generated(model, prompt, **{keyword: cache}), generated(model, prompt))
            assert hpc.last_report(model).reused_tokens == 13
        else:
            with pytest.raises(ValueError, match="cache"):
                generated(model, prompt, **{keyword: cache})
