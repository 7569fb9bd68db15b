"""Rotary scalings that change with the total length: below, across and above, as a fresh model computes it.

Dynamic NTK remembers the longest sequence that a model has seen, so the oracle is a model that has seen none.
"""

import pytest
import torch
from transformers import LlamaConfig, Phi3Config

import hf_prefix_cache as hpc
from generation.oracles import NEW_TOKENS, STRATEGIES, counted, generated, pad_left, tokens
from hf_prefix_cache.compat import CACHE_ARGUMENT, cache_argument, original_max_positions
from tiny_models import DECODER, build

LIMIT = 24


def phi3():
    sizes = {**DECODER, "max_position_embeddings": 96}
    del sizes["head_dim"]
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [4.0, 6.0, 8.0, 9.0]}
    return build(
        Phi3Config(**sizes, original_max_position_embeddings=LIMIT, rope_parameters={**scaling, "rope_theta": 100.0})
    )


def longrope_llama():
    scaling = {"rope_type": "longrope", "short_factor": [1.0, 1.2, 1.5, 2.0], "long_factor": [4.0, 6.0, 8.0, 9.0]}
    scaling |= {"rope_theta": 100.0, "original_max_position_embeddings": LIMIT}
    return build(LlamaConfig(**{**DECODER, "max_position_embeddings": 96}, rope_parameters=scaling))


def dynamic_llama():
    scaling = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    return build(LlamaConfig(**{**DECODER, "max_position_embeddings": LIMIT}, rope_parameters=scaling))


MAKERS = (phi3, longrope_llama, dynamic_llama)
pytestmark = pytest.mark.parametrize("make", MAKERS)
with_strategies = pytest.mark.parametrize("strategy", STRATEGIES)


def fresh(make, ids, **options):
    return generated(make(), ids, **options)


def test_the_limit_is_where_the_numbers_change(make):
    assert original_max_positions(make().config) == LIMIT
    ids, model = tokens(1, LIMIT + 1), make()
    with torch.no_grad():
        short, long = model(ids[:, :LIMIT]).logits, make()(ids).logits[:, :LIMIT]
        assert (short - long).abs().max() > 1e-2
        torch.testing.assert_close(make()(ids[:, :LIMIT]).logits[:, :10], make()(ids[:, :10]).logits)


@with_strategies
def test_prompts_below_across_and_above_the_limit(make, strategy):
    model, text = make(), tokens(1, 60)
    reused = {}
    for length in (10, 14, 22, LIMIT, LIMIT + 1, 40, 12, 45, 23):
        output = generated(model, text[:, :length], cache_implementation=strategy)
        assert torch.equal(output, fresh(make, text[:, :length])), length
        reused[length] = hpc.last_report(model).reused_tokens
        if length > LIMIT:
            assert "rotary scaling changes" in hpc.last_report(model).reason
    assert reused.pop(14) in (10, 11)  # an answer may begin as the text goes on
    assert reused == {10: 0, 22: 14, LIMIT: 22, LIMIT + 1: 0, 40: 0, 12: 11, 45: 0, 23: 22}


@with_strategies
def test_answers_that_cross_the_limit_keep_only_what_was_computed_below_it(make, strategy):
    model, prompt = make(), tokens(1, LIMIT - 4)
    output = generated(model, prompt, max_new_tokens=12, cache_implementation=strategy)
    assert torch.equal(output, fresh(make, prompt, max_new_tokens=12))
    for length in (LIMIT - 4, LIMIT - 1, LIMIT):
        following = output[:, :length]
        again = generated(model, following, cache_implementation=strategy)
        assert torch.equal(again, fresh(make, following))
        assert hpc.last_report(model).reused_tokens == length - 1


@with_strategies
def test_rows_whose_longest_crosses_the_limit(make, strategy):
    """All rows of a batch change their frequencies with the longest one: nothing after that may be kept of any."""
    model, prefix = make(), tokens(8)
    rows = [torch.cat([prefix, tokens(count, seed=count)]) for count in (13, 4)]
    ids, mask = pad_left(*rows)
    for _ in range(2):
        for new in (2, 12):
            output = generated(model, ids, attention_mask=mask, max_new_tokens=new, cache_implementation=strategy)
            assert torch.equal(output, fresh(make, ids, attention_mask=mask, max_new_tokens=new))
    short = output[1:, 9:]  # without its padding: 12 tokens of prompt and 12 of answer
    for length in range(13, LIMIT + 1):
        again = generated(model, short[:, :length], cache_implementation=strategy, max_new_tokens=3)
        assert torch.equal(again, fresh(make, short[:, :length], max_new_tokens=3)), length


@with_strategies
def test_chunks_and_beams_above_the_limit(make, strategy):
    model, text = make(), tokens(1, 50)
    for options in ({"prefill_chunk_size": 10}, {"num_beams": 3}):
        for length in (15, 20, 40):
            output = generated(model, text[:, :length], cache_implementation=strategy, **options)
            assert torch.equal(output, fresh(make, text[:, :length], **options)), (length, options)


def test_a_cache_that_is_passed_is_computed_anew_where_it_must_be(make):
    text = tokens(1, 60)
    for held, length in ((10, 20), (20, LIMIT), (20, LIMIT + 1), (20, 40), (30, 40), (30, 20)):
        model = make()
        cache = hpc.PrefixDynamicCache(config=model.config)
        generated(model, text[:, :held], max_new_tokens=1, **cache_argument(cache))
        held = cache.seq_length  # Phi-3 itself drops a cache above the limit
        with counted(model) as count:
            output = generated(model, text[:, :length], **cache_argument(cache))
        assert torch.equal(output, fresh(make, text[:, :length])), (held, length)
        anew = held > 0 and max(held, length) > LIMIT
        assert count.calls[0] == (length if anew else length - held)
        assert ("rotary scaling changes" in hpc.last_report(model).reason) == anew


def test_new_tokens_alone_that_cross_the_limit_are_refused(make):
    model, text = make(), tokens(1, 40)
    cache = hpc.PrefixDynamicCache(config=model.config)
    generated(model, text[:, :20], max_new_tokens=1, **cache_argument(cache))
    mask = torch.ones(1, 40, dtype=torch.long)
    for length in (22, 40):
        with pytest.raises(
            hpc.UnsupportedModelError, match=r"changes at 24, where the cached ones become wrong; pass complete"
        ):
            generated(model, text[:, 20:length], attention_mask=mask[:, :length], **cache_argument(cache))
    assert cache.seq_length == 20
    options = {"max_new_tokens": 3}
    output = generated(model, text[:, 20:22], attention_mask=mask[:, :22], **options, **cache_argument(cache))
    assert torch.equal(output[:, 2:], fresh(make, text[:, :22], **options)[:, 22:])


def test_a_padded_batch_from_the_store_is_computed_anew_where_it_can_cross_the_limit(make):
    model, prefix = make(), tokens(8)
    ids, mask = pad_left(torch.cat([prefix, tokens(5, seed=5)]), torch.cat([prefix, tokens(2, seed=2)]))
    generated(model, prefix[None], max_new_tokens=1, cache_implementation="prefix-dynamic")
    options = {"return_dict_in_generate": True, "cache_implementation": "prefix-dynamic"}
    first = generated(model, ids, attention_mask=mask, max_new_tokens=3, **options)
    assert hpc.last_report(model).stored_tokens == 8
    full_mask = torch.cat([mask, mask.new_ones(2, 3)], dim=1)
    for new in (6, 12):
        cache = first[CACHE_ARGUMENT].fork()
        options = {"attention_mask": full_mask, "max_new_tokens": new}
        output = generated(model, first.sequences, **options, **cache_argument(cache))
        assert torch.equal(output, fresh(make, first.sequences, **options))
        assert bool(hpc.last_report(model).reason) == (new == 12)


@with_strategies
def test_the_wrapper_with_prefixes_on_either_side(make, strategy):
    model, text = make(), tokens(1, 60)
    wrapped = hpc.PrefixCachedModel(model, strategy=strategy)
    for held in (10, LIMIT, 40):
        prefix = wrapped.prefill(text[:, :held])
        with torch.no_grad():
            expected = make()(text[:, :held]).logits[:, -1]
        torch.testing.assert_close(prefix.next_logits, expected, atol=1e-4, rtol=0)
        for length in (8, 20, LIMIT, 30, 50):
            output = wrapped.generate(
                text[:, :length], prefix=prefix, max_new_tokens=NEW_TOKENS, do_sample=False, suppress_tokens=[0]
            )
            assert torch.equal(output, fresh(make, text[:, :length])), (held, length)
            report = wrapped.report()
            assert (report.reused_tokens > 0) == (length <= LIMIT)
    # A prefix above the limit is never taken for one below it.
    hpc.store_for(model).clear()
    wrapped.generate(text[:, :12], prefix=prefix, max_new_tokens=2, do_sample=False)
    assert wrapped.report().reused_tokens == 0


@with_strategies
@torch.no_grad()
def test_suffixes_behind_a_prefix_on_either_side(make, strategy):
    wrapped, text = hpc.PrefixCachedModel(make(), strategy=strategy), tokens(3, 60)
    text[:, :40] = text[:1, :40]
    for held in (10, 20, 30):
        prefix = wrapped.prefill(text[:1, :held])
        lengths, new = (2, 4, 9), 9
        mask = torch.tensor([[column < length for column in range(new)] for length in lengths]).long()
        output = wrapped.forward(text[:, held : held + new] * mask, prefix=prefix, attention_mask=mask)
        computed = 0
        for row, length in enumerate(lengths):
            expected = make()(text[row : row + 1, : held + length]).logits[:, held:]
            torch.testing.assert_close(output.logits[row : row + 1, :length], expected, atol=1e-4, rtol=0)
            computed += length + (held if held + length > LIMIT else 0)
        report = wrapped.report()
        assert (report.prompt_tokens, report.computed_tokens) == (3 * held + 15, computed)
        assert bool(report.reason) == (held + 9 > LIMIT)
    whole = wrapped.forward(text[:, 30:39], prefix=prefix)
    torch.testing.assert_close(whole.logits, make()(text[:, :39]).logits[:, 30:], atol=1e-4, rtol=0)
    blind = hpc.PrefixDynamicCache(config=wrapped.model.config)
    wrapped.model(text[:1, :20], **cache_argument(blind))
    with pytest.raises(
        hpc.SnapshotIncompleteError, match="changes at 24 tokens, and the prefix does not know its tok"
    ):
        wrapped.forward(text[:, 20:29], prefix=blind)
