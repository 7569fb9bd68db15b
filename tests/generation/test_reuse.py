"""Reuse across calls and inside batches: for every tiny model and strategy, the tokens of the uncached call."""

import pytest
import torch

import hf_prefix_cache as hpc
from generation.oracles import COMBINATIONS, FULL_ATTENTION, WINDOWED, Checker, generated, pad_left, tokens
from tiny_models import TINY_MODELS

_known = {name: {} for name in TINY_MODELS}  # uncached results, for both strategies


@pytest.fixture(params=[f"{name}-{strategy}" for name, strategy in COMBINATIONS])
def check(request, tiny_model):
    name, strategy = request.param.split("-", 1)
    return Checker(tiny_model(name), strategy, _known[name])


@pytest.fixture
def slices(check):
    """Whether every prefix of what is cached can be reused: not so where windows have moved on."""
    return all(layer.is_sliceable for layer in hpc.PrefixDynamicCache(config=check.model.config).layers)


def test_prompts_in_any_relation_to_what_is_cached_get_the_uncached_tokens(check, slices):
    prompt = tokens(1, 20)
    first = check(prompt, reused=0)
    check(prompt, reused=19)  # wholly cached
    check(prompt[:, :13], reused=12 if slices else 0)  # shorter than what is cached
    diverging = torch.cat([prompt[:, :15], tokens(1, 6, seed=1)], dim=1)
    check(diverging, reused=15 if slices else 13)
    # The last generated token was never fed, so it and the five new ones are computed.
    check(torch.cat([first, tokens(1, 5, seed=2)], dim=1), reused=first.shape[1] - 1)
    check(tokens(1, 9, seed=3), reused=0)  # unrelated
    check(torch.tensor([[7]]), reused=0)  # nothing before the last token


def test_more_new_tokens_from_call_to_call(check):
    prompt = tokens(1, 18)
    for new in (3, 6, 4, 14):
        check(prompt, max_new_tokens=new)
    assert check.report.reused_tokens == 17


def test_left_padded_rows_that_share_a_prefix(check, slices):
    prefix = tokens(17)
    ids, mask = pad_left(*(torch.cat([prefix, tokens(count, seed=count)]) for count in (4, 1, 7)))
    check(ids, attention_mask=mask)
    # The second call finds 17 tokens for all rows. Windows forbid padding between them and the suffixes.
    check(ids, attention_mask=mask, reused=3 * 17 if slices else 0)
    assert bool(check.report.reason) != slices
    # What padded rows left behind serves single rows, and fewer of them.
    check(ids[1:2, 6:], reused=17)
    check(ids[:2], attention_mask=mask[:2])
    check(ids[2:], reused=23)
    check(ids)  # with the mask that Transformers infers from padding ids


def test_what_padded_rows_computed_behind_a_known_prefix_serves_single_rows(check, slices):
    prefix = tokens(17)
    check(prefix[None])
    rows = [torch.cat([prefix, tokens(count, seed=count)]) for count in (4, 1, 7)]
    ids, mask = pad_left(*rows)
    check(ids, attention_mask=mask, reused=3 * 17 if slices else 0)
    for row in rows:  # the store has their own tokens, from behind the padding between them and the prefix
        check(torch.cat([row, tokens(3, seed=9)])[None], reused=len(row))


def test_rows_of_equal_length_compute_what_they_share_once(check):
    ids = torch.cat([tokens(1, 40).expand(3, -1), tokens(3, 4, seed=1)], dim=1)
    check(ids, reused=2 * 40)
    assert check.report.stored_tokens == 0
    check(ids[:2], reused=2 * 40)  # fewer rows than the call before
    check(ids[2:], reused=43)


def test_sampled_tokens_with_a_fixed_seed(check):
    prompt, options = tokens(1, 20), {"do_sample": True, "temperature": 1.3, "top_k": 20}
    check(prompt, **options)
    check(prompt, **options, num_return_sequences=3, reused=3 * 19)


def test_beams_prefill_each_prompt_once(check):
    prompt, options = tokens(1, 20), {"max_new_tokens": 4}
    check(prompt, num_beams=3, reused=2 * 19, **options)
    check(prompt, num_beams=3, num_return_sequences=2, reused=3 * 19, **options)
    check(prompt, num_beams=2, do_sample=True, reused=2 * 19, **options)
    check(tokens(2, 20, seed=5), num_beams=3, reused=2 * 2 * 19, **options)


def test_padded_beams(check, slices):
    prefix, options = tokens(15), {"max_new_tokens": 4, "num_beams": 3}
    ids, mask = pad_left(*(torch.cat([prefix, tokens(count, seed=count)]) for count in (12, 9)))
    check(ids, attention_mask=mask, **options)
    check(ids, attention_mask=mask, **options)
    assert (check.report.reused_tokens > 0) == slices
    ids, mask = pad_left(tokens(22, seed=8), tokens(18, seed=9))
    check(ids, attention_mask=mask, **options)


def test_embeddings_in_place_of_ids(check):
    model, prompt = check.model, tokens(2, 12)
    embeds = model.get_input_embeddings()(prompt).detach()
    for extra in ({}, {"input_ids": prompt}):
        expected = generated(model, inputs_embeds=embeds, **extra)
        output = generated(model, inputs_embeds=embeds, cache_implementation=check.strategy, **extra)
        assert torch.equal(output, expected)
        assert check.report.prompt_tokens == check.report.computed_tokens == 24
        assert "inputs_embeds" in check.report.reason
    assert len(hpc.store_for(model)) == 0  # there are no ids to find them by


def test_chunked_prefill(check):
    prompt, options = tokens(1, 18), {"prefill_chunk_size": 4}
    first = check(prompt, reused=0, **options)
    check(torch.cat([first, tokens(1, 9, seed=1)], dim=1), reused=first.shape[1] - 1, **options)
    rows = torch.cat([prompt.expand(2, -1), tokens(2, 7, seed=2)], dim=1)
    check(rows, reused=2 * 18, **options)
    ids, mask = pad_left(rows[0], rows[1, :20])
    check(ids, attention_mask=mask, **options)
    check(torch.cat([rows[:1], tokens(1, 3, seed=3)], dim=1), prefill_chunk_size=1, reused=25)


def test_logits_and_scores_of_every_step(check):
    prompts = torch.cat([tokens(1, 12).expand(2, -1), tokens(2, 4, seed=1)], dim=1)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    expected = generated(check.model, prompts, **options)
    check(prompts[:1, :12])
    for _ in range(2):
        output = generated(check.model, prompts, cache_implementation=check.strategy, **options)
        for kind in ("logits", "scores"):
            torch.testing.assert_close(output[kind], expected[kind], atol=1e-4, rtol=0)
        assert torch.equal(output.sequences, expected.sequences)
        assert check.report.reused_tokens == 2 * 12


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_reuse_the_end_of_the_prompt_and_of_the_answer(name, tiny_model):
    check, prompt, other = Checker(tiny_model(name), "prefix-dynamic"), tokens(1, 24), tokens(1, 3, seed=1)
    answer = check(prompt, max_new_tokens=12)
    check(torch.cat([prompt, other], dim=1), reused=24)  # the boundary at the end of the prompt
    check(torch.cat([answer, other], dim=1), reused=35)  # that of the answer
    check(torch.cat([answer[:, :30], other], dim=1), reused=24)  # the deepest one before the match


@pytest.mark.parametrize("name", FULL_ATTENTION)
def test_rows_that_end_early_keep_what_they_were_fed(name, tiny_model):
    model, prompts = tiny_model(name), tokens(3, 12)
    free = generated(model, prompts, max_new_tokens=10)
    end = int(free[1, 15])
    check, options = Checker(model, "prefix-dynamic"), {"max_new_tokens": 10, "eos_token_id": end, "pad_token_id": 0}
    output = check(prompts, **options)
    lengths = [int((row[12:] == end).nonzero()[0]) + 13 if end in row[12:] else 22 for row in output]
    assert min(lengths) < max(lengths)
    for row, length in zip(output, lengths, strict=True):
        # The token that ends a row is fed if another row goes on; what is after it is padding and must not be found.
        following = torch.cat([row[None, :length], tokens(1, 4, seed=4)], dim=1)
        check(following, reused=length if length < max(lengths) else length - 1)
