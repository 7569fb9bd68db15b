"""Decode steps that attend only as far as needed: compiled ahead, one graph for each reach, and never too short."""

import gc
import weakref

import pytest
import torch

import hf_prefix_cache as hpc
from generation.compiling import STATIC, compare, everywhere
from generation.oracles import generated, pad_left, tokens
from hf_prefix_cache.compat import CACHE_ARGUMENT
from hf_prefix_cache.generation import steps
from hf_prefix_cache.generation.static_sizes import StaticSize, _models
from zoo.build import build_architecture

LENGTH = 64
REACHES = (8, 32, LENGTH)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Let buffers of 64 tokens be read in parts, which they are too short for otherwise."""
    monkeypatch.setattr(steps, "_LEAST_SAVED", 16)


@pytest.fixture
def taken(monkeypatch):
    """Record the reach of every step that was compiled apart."""
    reaches, original = [], steps.DecodeSteps.at

    def at(self, reach):
        reaches.append(reach)
        return original(self, reach)

    monkeypatch.setattr(steps.DecodeSteps, "at", at)
    return reaches


def warm(model, *batch_sizes, config=None):
    return hpc.warmup(
        model,
        max_cache_len=LENGTH,
        batch_sizes=batch_sizes or (1,),
        compile_config=config or everywhere(),
        progress=False,
    )


@pytest.mark.parametrize("dynamic", [False, pytest.param(None, marks=pytest.mark.slow)])
def test_answers_that_outgrow_every_reach_compile_nothing(dynamic, tiny_model, graphs, taken):
    model, config = tiny_model("llama"), everywhere(dynamic=dynamic)
    ready = warm(model, config=config)
    compiled = graphs()
    assert ready.read_lengths == REACHES
    assert compiled == ready.graphs == len(REACHES)
    for length, new in ((3, 61), (7, 2), (8, 2), (9, 24), (31, 3), (32, 2), (33, 31), (63, 1), (1, 5)):
        taken.clear()
        compare(model, tokens(1, length, seed=length), max_new_tokens=new, max_cache_len=LENGTH, config=config)
        # Step n holds n - 1 fed tokens and its own: the first new token needs no step, the last is never fed.
        held = range(length + 1, length + new)
        assert taken == [min(reach for reach in REACHES if reach >= n) for n in held if n <= REACHES[-2]]
    assert graphs() == compiled


@pytest.mark.slow
def test_smaller_batches_beams_padding_and_lookup_read_as_far_as_their_longest_row(tiny_model, graphs, taken):
    model = tiny_model("llama")
    warm(model, 4)
    compiled = graphs()
    padded, mask = pad_left(tokens(1, 6, seed=3)[0], tokens(1, 2, seed=4)[0])
    options = {"max_cache_len": LENGTH, "max_new_tokens": 28}
    compare(model, padded, attention_mask=mask, **options)
    compare(model, tokens(3, 5, seed=5), **options)
    compare(model, tokens(1, 4, seed=6), num_beams=3, **options)
    compare(model, torch.cat([tokens(1, 12, seed=7), tokens(1, 9, seed=8)], dim=1), **options)
    assert graphs() == compiled
    assert set(taken) == set(REACHES[:-1])
    compare(model, tokens(1, 3, seed=9), prompt_lookup_num_tokens=3, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "gpt2", "deepseek_v32", "lfm2", "gemma3n_text"])
def test_windows_running_states_and_indexes_beside_full_attention_compile_nothing_later(name, graphs, taken):
    model = build_architecture(name)
    warm(model)
    compiled = graphs()
    for length, new in ((5, 40), (17, 18), (2, 3), (40, 20)):
        compare(model, tokens(1, length, seed=length), max_new_tokens=new, max_cache_len=LENGTH)
    assert graphs() == compiled
    assert set(taken) == set(REACHES[:-1])


@pytest.mark.slow
def test_a_smaller_batch_is_served_where_the_compiler_leaves_cache_updates_to_eager_code(graphs):
    model = build_architecture("llama4_text")
    warm(model, 2)
    compiled = graphs()
    for length in (5, 28):
        compare(model, tokens(1, length, seed=length), max_new_tokens=9, max_cache_len=LENGTH)
    assert graphs() == compiled


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=8)
def test_more_graphs_than_the_compiler_allows_for_one_function_are_all_compiled(tiny_model, graphs):
    model, sizes = tiny_model("llama"), (1, 2, 3, 4)
    ready = warm(model, *sizes)
    assert ready.graphs == len(sizes) * len(REACHES)
    for rows in sizes:
        compare(model, tokens(rows, 7), max_new_tokens=40, max_cache_len=LENGTH)
    assert graphs() == ready.graphs


@pytest.mark.slow
def test_what_was_not_warmed_up_reads_everything_and_is_compiled_once(tiny_model, graphs, taken):
    model = tiny_model("llama")
    for length in (3, 20, 40):
        compare(model, tokens(1, length), max_new_tokens=15, max_cache_len=LENGTH)
    assert (graphs(), taken) == (1, [])


@pytest.mark.slow
def test_another_length_or_configuration_than_was_warmed_up_reads_everything(tiny_model, graphs, taken):
    model = tiny_model("llama")
    warm(model)
    taken.clear()
    compare(model, tokens(1, 9), max_new_tokens=15, max_cache_len=LENGTH - 2)
    compare(model, tokens(1, 9), max_new_tokens=15, max_cache_len=LENGTH, config=everywhere("aot_eager"))
    assert not taken
    compare(model, tokens(1, 9), max_new_tokens=15, max_cache_len=LENGTH)
    assert taken
    again = warm(model)
    assert (again.graphs, again.read_lengths) == (0, REACHES)


@pytest.mark.slow
def test_the_reach_is_taken_back_after_success_error_and_interruption(tiny_model, graphs):
    model, prompt = tiny_model("llama"), tokens(1, 9)
    warm(model)
    options = {**STATIC, "max_cache_len": LENGTH, "compile_config": everywhere(), "max_new_tokens": 4}
    output = generated(model, prompt, return_dict_in_generate=True, **options)
    cache = output[CACHE_ARGUMENT]
    assert cache.reach is None
    following = torch.cat([output.sequences, tokens(1, 20)], dim=1)
    assert torch.equal(
        generated(model, following, **{CACHE_ARGUMENT: cache}, max_new_tokens=4),
        generated(model, following, max_new_tokens=4),
    )
    seen = []
    for error in (ValueError, KeyboardInterrupt):

        def stop(ids, scores, error=error):
            if ids.shape[1] > prompt.shape[1] + 1:
                raise error
            return torch.zeros(len(ids), dtype=torch.bool)

        def remember(module, args, inputs):
            seen.append(inputs[CACHE_ARGUMENT])

        handle = model.register_forward_pre_hook(remember, with_kwargs=True)
        with pytest.raises(error):
            generated(model, prompt, stopping_criteria=[stop], **{**options, "compile_config": None})
        handle.remove()
    assert {cache.reach for cache in seen} == {None}


def test_a_reach_that_is_too_short_is_refused_before_anything_is_read(tiny_model, graphs, monkeypatch):
    model = tiny_model("llama")
    warm(model)

    def choose(self, cache, *, added):
        cache.reach = REACHES[0]

    monkeypatch.setattr(steps.DecodeSteps, "choose", choose)
    options = {**STATIC, "max_cache_len": LENGTH, "compile_config": everywhere()}
    assert generated(model, tokens(1, 5), max_new_tokens=4, **options).shape[1] == 9  # 8 of them were fed
    with pytest.raises(hpc.CacheCapacityError, match=r"reads the first 8 places .* holds 8 tokens and 1 come"):
        generated(model, tokens(1, 5), max_new_tokens=5, **options)
    monkeypatch.undo()
    cache = hpc.PrefixStaticCache(config=model.config, max_cache_len=LENGTH)
    cache.reach = 8  # of the caller's own, which no step is chosen for
    with pytest.raises(hpc.CacheCapacityError, match="reads the first 8 places"):
        generated(model, tokens(1, 5), max_new_tokens=5, compile_config=everywhere(), **{CACHE_ARGUMENT: cache})
    compare(model, tokens(1, 5), max_new_tokens=5, max_cache_len=LENGTH)


@torch.no_grad()
def test_eager_forwards_refuse_what_lies_behind_the_reach_and_change_nothing(tiny_model):
    model = tiny_model("llama")
    cache = hpc.PrefixStaticCache(config=model.config, max_cache_len=LENGTH)
    model(tokens(1, 12), **{CACHE_ARGUMENT: cache})
    cache.reach = 16
    held = [tensor.clone() for tensor in cache.tensors]
    with pytest.raises(hpc.CacheCapacityError, match="holds 12 tokens and 5 come"):
        model(tokens(1, 5), **{CACHE_ARGUMENT: cache})
    assert cache.seq_length == 12
    for before, now in zip(held, cache.tensors, strict=True):
        assert torch.equal(before, now)
    found = model(tokens(1, 4, seed=1), **{CACHE_ARGUMENT: cache}).logits
    whole = model(torch.cat([tokens(1, 12), tokens(1, 4, seed=1)], dim=1)).logits[:, 12:]
    torch.testing.assert_close(found, whole)


def test_what_attention_is_handed_are_views_of_the_buffers():
    layer = hpc.PrefixStaticCache(config=build_architecture("llama").config, max_cache_len=LENGTH).layers[0]
    layer.reach = 16
    keys, values = layer.update(torch.ones(1, 2, 3, 8), torch.ones(1, 2, 3, 8))
    assert keys.shape[2] == values.shape[2] == layer.get_mask_sizes(1)[0] == 16
    assert (keys.data_ptr(), values.data_ptr()) == (layer.keys.data_ptr(), layer.values.data_ptr())


def test_buffers_that_are_short_or_never_read_whole_have_no_parts(tiny_model, monkeypatch):
    assert steps.reaches_of(tiny_model("llama").config, LENGTH) == REACHES[::-1]
    assert steps.reaches_of(tiny_model("mistral").config, LENGTH) == (LENGTH,)  # windows alone
    assert steps.reaches_of(tiny_model("bloom").config, LENGTH) == (LENGTH,)  # has masks of its own
    assert steps.reaches_of(tiny_model("llama").config, 40) == (40, 20)
    assert steps.reaches_of(tiny_model("llama").config, 30) == (30,)
    flash = tiny_model("llama").config
    flash._attn_implementation = "some_flash"
    assert steps.reaches_of(flash, LENGTH) == (LENGTH,)  # takes what its mask shows
    monkeypatch.undo()
    lengths = {length: steps.reaches_of(tiny_model("llama").config, length) for length in (512, 1024, 2048, 4096)}
    assert lengths == {512: (512,), 1024: (1024, 512), 2048: (2048, 1024, 256), 4096: (4096, 2048, 512)}


def test_warming_up_that_fails_halfway_leaves_nothing_half_ready(tiny_model, graphs, taken):
    model, config, compiled = tiny_model("llama"), everywhere(), []

    def fails_second(graph, inputs):
        compiled.append(graph)
        if len(compiled) == 2:
            raise KeyboardInterrupt
        return graph.forward

    config.backend = fails_second
    with pytest.raises(KeyboardInterrupt):
        warm(model, config=config)
    size = StaticSize(1, LENGTH)
    assert size not in _models[model].kept
    assert size not in _models[model].free
    compare(model, tokens(1, 5), max_new_tokens=20, max_cache_len=LENGTH, config=config)
    assert not set(taken[1:])  # the one that failed was asked for by warming up itself


@pytest.mark.slow
def test_a_model_that_was_warmed_up_can_be_dropped(tiny_model, graphs):
    model = tiny_model("llama")
    warm(model)
    held = weakref.ref(model)
    del model
    torch._dynamo.reset()
    gc.collect()
    assert held() is None


def test_a_model_without_static_buffers_is_not_warmed_up_and_says_why():
    with pytest.raises(hpc.UnsupportedModelError, match="does not serve models of the type 'gpt_neo'"):
        warm(build_architecture("gpt_neo"))
