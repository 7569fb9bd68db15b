"""What users of other projects have reported of ``generate`` and of raw forwards: each kind, and how it behaves here.

The numbers are those of huggingface/transformers (tf) and of others where named.
"""

import copy
import gc
import itertools
import weakref

import pytest
import torch
from transformers import GenerationConfig

import hf_prefix_cache as hpc
from generation.oracles import COMBINATIONS, STRATEGIES, Checker, counted, generated, pad_left, tokens
from hf_prefix_cache.compat import CACHE_ARGUMENT, cache_argument

MODELS = ("llama", "gpt2", "bloom", "gemma3_text")
everywhere = pytest.mark.parametrize(("name", "strategy"), [pair for pair in COMBINATIONS if pair[0] in MODELS])
ROOM = 64


def options(strategy):
    return {"max_cache_len": ROOM} if strategy == "prefix-static" else {}


def new_tokens(model, ids, **kwargs):
    return generated(model, ids, **kwargs)[:, ids.shape[1] :]


def logits_of(model, row):
    with torch.no_grad():
        return model(row[None]).logits[0]


@everywhere
@pytest.mark.parametrize("passes", ["everything", "new tokens", "new tokens and a mask"])
def test_27546_24841_the_cache_of_generate_goes_back_in(name, strategy, passes, tiny_model):
    model = tiny_model(name)
    first = generated(
        model, tokens(1, 11), cache_implementation=strategy, return_dict_in_generate=True, max_cache_len=ROOM
    )
    cache = first[CACHE_ARGUMENT]
    whole = torch.cat([first.sequences, tokens(1, 4, seed=1)], dim=1)
    ids = whole if passes == "everything" else whole[:, cache.seq_length :]
    mask = {"attention_mask": torch.ones_like(whole)} if passes == "new tokens and a mask" else {}
    assert torch.equal(new_tokens(model, ids, **mask, **cache_argument(cache)), new_tokens(model, whole))


@everywhere
def test_36151_38727_40906_a_cache_as_long_as_the_input(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 12)
    prefix = hpc.PrefixCachedModel(model).prefill(prompt)
    for extra in ({}, {"attention_mask": torch.ones_like(prompt)}):
        cache = prefix.to_cache(strategy, **options(strategy))
        assert torch.equal(generated(model, prompt, **extra, **cache_argument(cache)), generated(model, prompt))
    check = Checker(model, strategy)
    check(prompt, reused=11)


@everywhere
def test_37403_35707_embeddings_with_a_cache_as_with_ids(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 14)
    embeds = model.get_input_embeddings()(prompt).detach()
    for held in (9, 14):
        cache = hpc.PrefixCachedModel(model).prefill(prompt[:, :held]).to_cache(strategy, **options(strategy))
        output = generated(model, inputs_embeds=embeds, **cache_argument(cache))
        assert torch.equal(output, new_tokens(model, prompt))


@everywhere
@pytest.mark.parametrize("side", ["left", "right"])
def test_34232_a_prefix_computed_once_for_a_batch_of_suffixes_of_any_length(name, strategy, side, tiny_model):
    model = tiny_model(name)
    wrapped = hpc.PrefixCachedModel(model, strategy=strategy)
    suffixes = [tokens(count, seed=count) for count in (3, 6, 1)]
    ids, mask = pad_left(*suffixes)
    if side == "right":
        ids = torch.stack([row.roll(int(count)) for row, count in zip(ids, mask.sum(1), strict=True)])
        mask = mask.flip(1)
    prefix = wrapped.prefill(tokens(1, 12))
    logits = wrapped.forward(ids, prefix=prefix, attention_mask=mask).logits
    for row, suffix in enumerate(suffixes):
        expected = logits_of(model, torch.cat([tokens(12), suffix]))[12:]
        torch.testing.assert_close(logits[row, mask[row].bool()], expected, atol=1e-4, rtol=0)
    # And through generate, where the whole prompts are passed.
    prompts, prompt_mask = pad_left(*(torch.cat([tokens(12), suffix]) for suffix in suffixes))
    output = generated(model, prompts, attention_mask=prompt_mask, cache_implementation=strategy)
    assert torch.equal(output, generated(model, prompts, attention_mask=prompt_mask))


@pytest.mark.parametrize("name", MODELS)
def test_3095_4368_every_pair_of_two_prefixes_and_three_suffixes(name, tiny_model):
    wrapped = hpc.PrefixCachedModel(tiny_model(name))
    prefixes = [tokens(length, seed=length) for length in (9, 13)]
    suffixes = [tokens(length, seed=20 + length) for length in (2, 5, 3)]
    computed = [wrapped.prefill(prefix) for prefix in prefixes]
    ids, mask = pad_left(*suffixes)
    for (prefix, snapshot), _ in itertools.product(zip(prefixes, computed, strict=True), range(2)):
        logits = wrapped.forward(ids, prefix=snapshot, attention_mask=mask).logits
        for row, suffix in enumerate(suffixes):
            expected = logits_of(wrapped.model, torch.cat([prefix, suffix]))[-1]
            torch.testing.assert_close(logits[row, -1], expected, atol=1e-4, rtol=0)
            assert torch.equal(logits[row, -1].topk(5).indices, expected.topk(5).indices)


@pytest.mark.parametrize(
    ("name", "strategy"), [pair for pair in COMBINATIONS if pair[0] in ("llama", "gpt2", "bloom")]
)
def test_18104_padding_between_what_is_cached_and_what_is_new(name, strategy, tiny_model):
    model = tiny_model(name)
    cache = hpc.PrefixCachedModel(model).prefill(tokens(1, 10)).to_cache(strategy, batch_size=2, **options(strategy))
    rows = [torch.cat([tokens(10), tokens(4, seed=1)]), torch.cat([tokens(10), tokens(2, seed=2)])]
    ids, mask = pad_left(*(row[10:] for row in rows))
    with torch.no_grad():
        logits = model(**cache.prepare_inputs(ids, mask)._asdict(), **cache_argument(cache)).logits
        for row, expected in enumerate(rows):
            torch.testing.assert_close(logits[row, -1], logits_of(model, expected)[-1], atol=1e-4, rtol=0)
    # Generation goes on from there: the cache remembers where its padding is.
    whole_mask = torch.cat([torch.ones(2, 10, dtype=torch.long), mask, torch.ones(2, 3, dtype=torch.long)], dim=1)
    turn = tokens(2, 3, seed=9)
    output = generated(model, turn, attention_mask=whole_mask, **cache_argument(cache))[:, 3:]
    for row, expected in enumerate(rows):
        assert torch.equal(output[row : row + 1], new_tokens(model, torch.cat([expected, turn[row]])[None]))


@pytest.mark.parametrize("name", [name for name, strategy in COMBINATIONS if strategy == "prefix-static"])
def test_29151_49004_suffixes_of_any_length_behind_a_static_prefix(name, tiny_model):
    model, text = tiny_model(name), tokens(1, 50)
    prefix = hpc.PrefixCachedModel(model).prefill(text[:, :10])
    cache = hpc.PrefixStaticCache(config=model.config, max_cache_len=ROOM)
    for length in (1, 2, 7, 8, 9, 31):
        cache.restore(prefix)
        output = generated(model, text[:, : 10 + length], max_new_tokens=2, **cache_argument(cache))
        assert torch.equal(output, generated(model, text[:, : 10 + length], max_new_tokens=2))


def test_46421_46424_the_wish_for_a_length_is_honoured(tiny_model):
    model = tiny_model("llama")
    for prompt in (tokens(1, 9), tokens(1, 20)):
        output = generated(
            model,
            prompt,
            cache_implementation="prefix-static",
            max_cache_len=ROOM,
            prefill_chunk_size=4,
            return_dict_in_generate=True,
        )
        assert output[CACHE_ARGUMENT].get_max_length() == ROOM
        assert torch.equal(output.sequences, generated(model, prompt))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mistral"])
def test_37394_35444_32657_smaller_batches_on_a_static_cache_and_larger_ones_refused(name, tiny_model):
    model, prompts = tiny_model(name), tokens(4, 9)
    cache = hpc.PrefixStaticCache(config=model.config, max_cache_len=ROOM, max_batch_size=3)
    for rows in (3, 1, 2):
        cache.reset()
        output = generated(model, prompts[:rows], **cache_argument(cache))
        assert torch.equal(output, generated(model, prompts[:rows]))
    cache.reset()
    with pytest.raises(hpc.BatchSizeError, match="max_batch_size=4"):
        generated(model, prompts, **cache_argument(cache))
    check = Checker(model, "prefix-static")
    for rows in (4, 2, 3, 1):
        check(prompts[:rows])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_47731_dropping_the_last_reference_frees_the_tensors(strategy, tiny_model):
    model = tiny_model("llama")
    output = generated(model, tokens(1, 9), cache_implementation=strategy, return_dict_in_generate=True)
    held = [weakref.ref(tensor) for tensor in output[CACHE_ARGUMENT].tensors]
    del output
    gc.collect()
    assert held
    assert not any(tensor() is not None for tensor in held)
    # What the store has kept goes with the store's own rules.
    assert hpc.store_for(model).nbytes > 0
    hpc.store_for(model).clear()
    assert hpc.store_for(model).nbytes == 0


@pytest.mark.parametrize("strategy", hpc.validation.STRATEGIES)
def test_34718_names_validate_save_and_load(strategy, tmp_path):
    config = GenerationConfig(cache_implementation=strategy)
    config.validate(strict=True)
    config.save_pretrained(tmp_path)
    assert GenerationConfig.from_pretrained(tmp_path).cache_implementation == strategy


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_45510_48700_the_cache_config_of_the_user_stays_as_it_is(strategy, tiny_model):
    model, mine = tiny_model("llama"), {"namespace": "tenant", "reuse": True}
    before = copy.deepcopy(mine)
    config = GenerationConfig(cache_implementation=strategy, cache_config=mine, max_new_tokens=3, do_sample=False)
    for _ in range(2):
        model.generate(tokens(1, 9), generation_config=config)
    assert mine == before
    assert config.cache_config == before
    assert hpc.last_report(model).reused_tokens == 8


@everywhere
def test_37078_a_prefix_is_the_same_after_any_number_of_calls(name, strategy, tiny_model):
    wrapped = hpc.PrefixCachedModel(tiny_model(name), strategy=strategy)
    prefix = wrapped.prefill(tokens(1, 12))
    before = [tensor.clone() for tensor in prefix.tensors]
    ids, mask = pad_left(tokens(4), tokens(2))
    prompts, prompt_mask = pad_left(
        *(torch.cat([tokens(12), row[present.bool()]]) for row, present in zip(ids, mask, strict=True))
    )
    for extra in ({}, {"num_beams": 2}, {"do_sample": True}):
        wrapped.generate(prompts, attention_mask=prompt_mask, prefix=prefix, max_new_tokens=4, **extra)
    wrapped.forward(ids, prefix=prefix, attention_mask=mask)
    with torch.no_grad():
        wrapped.model(tokens(1, 3), use_cache=False, **cache_argument(prefix.to_cache()))
    assert all(torch.equal(one, other) for one, other in zip(before, prefix.tensors, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["gemma3_text", "mistral", "gpt_oss", "llama4"])
def test_38156_prefixes_longer_than_the_window(name, strategy, tiny_model):
    check, text = Checker(tiny_model(name), strategy), tokens(1, 40)
    for length in (12, 13, 20, 21, 40):  # the window is 8
        check(text[:, :length], max_new_tokens=12)


def test_mlx_lm_980_what_is_computed_anew_is_in_the_numbers(tiny_model):
    model = tiny_model("mistral")
    ids, mask = pad_left(*(torch.cat([tokens(20), tokens(count, seed=count)]) for count in (3, 5)))
    for _ in range(2):
        generated(model, ids, attention_mask=mask, cache_implementation="prefix-dynamic")
        report = hpc.last_report(model)
        assert (report.prompt_tokens, report.computed_tokens, report.reused_tokens) == (48, 48, 0)
        assert "windows" in report.reason


@pytest.mark.parametrize("name", MODELS)
def test_27449_beams_prefill_their_prompt_once(name, tiny_model):
    model, prompts = tiny_model(name), tokens(2, 20)
    for ids, distinct in ((prompts[:1], 1), (prompts, 2)):
        with counted(model) as count:
            output = generated(model, ids, num_beams=4, max_new_tokens=1, cache_implementation="prefix-dynamic")
        assert torch.equal(output, generated(model, ids, num_beams=4, max_new_tokens=1))
        assert count.calls == [distinct * 19, distinct * 4]  # all but the last token once, and that for every beam
        hpc.store_for(model).clear()
