"""Compiled decoding on the CPU: what is compiled serves every prefix, prompt, batch and answer of its size."""

import gc
import logging
import weakref

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

import hf_prefix_cache as hpc
from generation.compiling import STATIC, compare, everywhere
from generation.oracles import generated, pad_left, tokens
from hf_prefix_cache.compat import CACHE_ARGUMENT
from hf_prefix_cache.generation.compiled import pad_compiled_steps
from hf_prefix_cache.generation.static_sizes import _models


@pytest.mark.parametrize("name", ["llama", "mistral", pytest.param("gemma3_text", marks=pytest.mark.slow)])
def test_29151_30351_prefixes_prompts_and_answers_of_any_length_go_through_what_warming_up_compiled(
    name, tiny_model, graphs
):
    model = tiny_model(name)
    ready = hpc.warmup(model, max_cache_len=64, compile_config=everywhere(), progress=False)
    compiled = graphs()
    assert compiled == ready.graphs > 0
    first = compare(model, tokens(1, 12), max_cache_len=64)
    following = torch.cat([first, tokens(1, 5, seed=1)], dim=1)
    for length, new in ((1, 8), (2, 3), (7, 9), (8, 2), (9, 20), (31, 30), (56, 8)):
        compare(model, tokens(1, length, seed=length), max_new_tokens=new, max_cache_len=64)
    compare(model, following, max_cache_len=64)
    assert hpc.last_report(model).reused_tokens == first.shape[1] - 1
    assert graphs() == compiled


def test_37394_35444_32657_smaller_batches_run_in_the_rows_of_larger_ones(tiny_model, graphs):
    model = tiny_model("llama")
    hpc.warmup(model, max_cache_len=48, batch_sizes=(4,), compile_config=everywhere(), progress=False)
    compiled = graphs()
    padded, mask = pad_left(*tokens(2, 11, seed=3).split(1)[0], tokens(1, 6, seed=4)[0])
    for rows in (4, 1, 3, 2):
        output = compare(model, tokens(rows, 9, seed=rows), max_cache_len=48)
        assert output.shape[0] == rows
    compare(model, padded, attention_mask=mask, max_cache_len=48)
    compare(model, tokens(1, 9), num_beams=2, max_cache_len=48)
    compare(model, torch.cat([tokens(1, 9), tokens(1, 3, seed=8)], dim=1), max_cache_len=48)
    assert hpc.last_report(model).reused_tokens == 9
    assert graphs() == compiled


@pytest.mark.slow
def test_46421_46424_the_wish_for_a_length_is_honoured_and_chunks_of_the_prompt_are_not_compiled(tiny_model, graphs):
    model = tiny_model("llama")
    for length in (9, 20, 13):
        output = generated(
            model,
            tokens(1, length, seed=length),
            max_cache_len=40,
            prefill_chunk_size=4,
            compile_config=everywhere(),
            return_dict_in_generate=True,
            **STATIC,
        )
        assert output[CACHE_ARGUMENT].get_max_length() == 40
        assert torch.equal(output.sequences, generated(model, tokens(1, length, seed=length)))
    assert graphs() == 1
    compare(model, tokens(1, 9, seed=9), max_cache_len=30)  # another wish, which takes another graph
    assert graphs() == 2


@pytest.mark.slow
def test_without_a_wish_the_length_doubles_when_it_is_outgrown_and_says_so(tiny_model, graphs, caplog):
    model, lengths = tiny_model("llama"), []
    with caplog.at_level(logging.WARNING, logger="hf_prefix_cache"):
        for new in (3, 18, 9, 40):
            output = generated(
                model,
                tokens(1, 12),
                max_new_tokens=new,
                compile_config=everywhere(),
                return_dict_in_generate=True,
                **STATIC,
            )
            lengths.append(output[CACHE_ARGUMENT].get_max_length())
            assert torch.equal(output.sequences, generated(model, tokens(1, 12), max_new_tokens=new))
    assert lengths == [16, 32, 32, 64]
    assert graphs() == 3
    growths = [record.getMessage() for record in caplog.records if "grow to" in record.getMessage()]
    assert [" 32," in growths[0], " 64," in growths[1], len(growths)] == [True, True, 2]
    assert hpc.last_report(model).notes[0] == growths[1]


@pytest.mark.slow
def test_a_wish_that_is_too_small_grows_and_says_so(tiny_model, graphs):
    model = tiny_model("llama")
    compare(model, tokens(1, 12), max_new_tokens=9, max_cache_len=16)
    assert "max_cache_len is 16 and the call may need 20" in hpc.last_report(model).notes[0]


@pytest.mark.slow
def test_buffers_stay_at_their_addresses_between_calls_until_they_are_released(tiny_model, graphs):
    model, addresses = tiny_model("llama"), set()
    ready = hpc.warmup(model, max_cache_len=40, compile_config=everywhere(), progress=False)
    ((size, held),) = _models[model].free.items()
    first = tuple(tensor.data_ptr() for tensor in held[0].tensors)
    for length in (5, 12, 12):
        compare(model, tokens(1, length, seed=length), max_cache_len=40)
        (cache,) = _models[model].free[size]
        addresses.add(tuple(tensor.data_ptr() for tensor in cache.tensors))
        assert cache.seq_length == 0
    assert addresses == {first}
    with pytest.raises(KeyboardInterrupt):
        generated(
            model,
            tokens(1, 9),
            max_cache_len=40,
            compile_config=everywhere(),
            stopping_criteria=[lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)],
            **STATIC,
        )
    assert len(_models[model].free[size]) == 1
    output = generated(
        model, tokens(1, 9), max_cache_len=40, compile_config=everywhere(), return_dict_in_generate=True, **STATIC
    )
    # What the caller holds is the caller's.
    assert not _models[model].free[size]
    compare(model, tokens(1, 7), max_cache_len=40)
    assert output[CACHE_ARGUMENT].seq_length == output.sequences.shape[1] - 1
    kept = weakref.ref(_models[model].free[size][0])
    ready.release()
    del cache, held
    gc.collect()
    assert kept() is None


@pytest.mark.slow
def test_47731_without_warming_up_nothing_is_kept_when_a_compiled_call_ends(tiny_model, graphs):
    model = tiny_model("llama")
    compare(model, tokens(1, 9))
    assert not any(_models[model].free.values())


@pytest.mark.slow
def test_a_restored_cache_of_the_caller_goes_through_one_graph(tiny_model, graphs):
    model = tiny_model("llama")
    cache = hpc.PrefixStaticCache(config=model.config, max_cache_len=64, max_batch_size=3)
    prefixes = [hpc.PrefixCachedModel(model).prefill(tokens(1, length, seed=length)) for length in (11, 17)]
    compiled = []
    for prefix, rows in zip((*prefixes, *prefixes), (3, 1, 2, 3), strict=True):
        cache.load(prefix, batch_size=rows)
        addresses = [tensor.data_ptr() for tensor in cache.tensors]
        prompt = torch.cat([prefix.input_ids.expand(rows, -1), tokens(rows, 3)], dim=1)
        output = generated(model, prompt, compile_config=everywhere(), **{CACHE_ARGUMENT: cache})
        assert torch.equal(output, generated(model, prompt))
        assert [tensor.data_ptr() for tensor in cache.tensors] == addresses
        compiled.append(graphs())
    assert compiled[0] == compiled[-1] > 0


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
def test_37908_the_dynamic_strategy_is_never_compiled(name, tiny_model, graphs):
    model, prompt = tiny_model(name), tokens(1, 12)
    for strategy in ("prefix-dynamic", "prefix-offloaded"):
        output = generated(
            model, prompt, cache_implementation=strategy, compile_config=everywhere(), prefill_chunk_size=5
        )
        assert torch.equal(output, generated(model, prompt))
    assert graphs() == 0


def test_flash_attention_keeps_its_mask_on_a_static_cache(tiny_model):
    """It sees a buffer of fixed length, of which only the mask says how much is filled."""
    model, masks = tiny_model("llama"), []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen = key.shape[2]
        if seen == query.shape[2]:  # a prompt that sees itself only
            return sdpa_attention_forward(module, query, key, value, None, is_causal=True, **kwargs)
        masks.append(attention_mask)
        visible = torch.zeros(query.shape[0], seen, dtype=torch.bool)
        visible[:, : attention_mask.shape[1]] = attention_mask[:, :seen].bool()
        last = int(visible[0].nonzero()[-1]) + 1
        places = torch.arange(last - query.shape[2], last)
        allowed = visible[:, None, None] & (torch.arange(seen) <= places[:, None])
        return sdpa_attention_forward(module, query, key, value, allowed, is_causal=False, **kwargs)

    AttentionInterface.register("counting_flash", attend)
    AttentionMaskInterface.register("counting_flash", flash_attention_mask)
    expected = generated(model, tokens(2, 9))
    model.config._attn_implementation = "counting_flash"
    assert torch.equal(generated(model, tokens(2, 9), max_cache_len=30, **STATIC), expected)
    assert masks
    assert all(mask is not None for mask in masks)


def test_what_cannot_be_warmed_up_says_why(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(hpc.UnsupportedModelError, match="_compile_all_devices"):
        hpc.warmup(model, max_cache_len=64)
    with pytest.raises(hpc.CacheCapacityError, match="max_cache_len is 2"):
        hpc.warmup(model, max_cache_len=2, compile_config=everywhere())
    for sizes in ((), (1, 0)):
        with pytest.raises(hpc.BatchSizeError, match="batch_sizes"):
            hpc.warmup(model, max_cache_len=64, batch_sizes=sizes, compile_config=everywhere())


def test_unregistering_takes_the_compiled_call_back_too():
    original = PreTrainedModel.get_compiled_call
    for _ in range(2):
        pad_compiled_steps()
    assert "hf_prefix_cache" in PreTrainedModel.get_compiled_call.__module__
    hpc.unregister()
    hpc.register()
    assert "hf_prefix_cache" not in PreTrainedModel.get_compiled_call.__module__
    assert PreTrainedModel.get_compiled_call.__qualname__ == "PreTrainedModel.get_compiled_call"
    assert "hf_prefix_cache" in original.__module__ or original is PreTrainedModel.get_compiled_call


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, inside
def test_with_the_compiler_itself(tiny_model, graphs):
    model = tiny_model("llama")
    options = {**STATIC, "max_cache_len": 64, "compile_config": everywhere("inductor")}
    for prompt in (tokens(1, 12), tokens(1, 20, seed=1), tokens(1, 12)):
        assert torch.equal(generated(model, prompt, **options), generated(model, prompt))
    assert hpc.last_report(model).reused_tokens == 11
    assert graphs() == 1
