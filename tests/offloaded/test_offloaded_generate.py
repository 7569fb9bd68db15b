"""``generate`` with ``prefix-offloaded`` equals the uncached call token for token, in every mode."""

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import CACHE_ARGUMENT
from hf_prefix_cache.exceptions import UnknownOptionError
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS


def ids(rows, tokens):
    return torch.randint(1, 99, (rows, tokens))


def plain(model, prompt, **kwargs):
    return model.generate(prompt, max_new_tokens=6, **{"do_sample": False, **kwargs})


def ours(model, prompt, **kwargs):
    return plain(model, prompt, cache_implementation="prefix-offloaded", **kwargs)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_fresh_and_repeated_calls_equal_the_uncached_call(name):
    model = TINY_MODELS[name]()
    prompt = ids(1, 60)
    expected = plain(model, prompt)
    assert torch.equal(ours(model, prompt), expected)
    assert torch.equal(ours(model, prompt), expected)
    assert hpc.last_report(model).strategy == "prefix-offloaded"
    assert hpc.last_report(model).reused_tokens == 59
    # What is exact serves other exact strategies, and the other way round.
    longer = torch.cat([prompt, ids(1, 5)], dim=1)
    assert torch.equal(plain(model, longer, cache_implementation="prefix-dynamic"), plain(model, longer))
    assert hpc.last_report(model).reused_tokens >= 59


@pytest.mark.parametrize(
    "mode",
    [
        {"num_beams": 3},
        {"num_beams": 2, "num_return_sequences": 2},
        {"num_return_sequences": 3, "do_sample": True},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 7},
    ],
    ids=lambda mode: "_".join(map(str, mode)),
)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_every_mode_equals_the_uncached_call(name, mode):
    model = TINY_MODELS[name]()
    prompt = ids(1, 60)
    for _ in range(2):
        torch.manual_seed(3)
        expected = plain(model, prompt, **mode)
        torch.manual_seed(3)
        assert torch.equal(ours(model, prompt, **mode), expected)


def test_batches_share_their_prefix_and_padded_rows_are_exact():
    model = TINY_MODELS["llama"]()
    batch = torch.cat([ids(1, 50).expand(3, -1), ids(3, 8)], dim=1)
    batch[0, :4] = 0
    batch[0, 4:54] = batch[1, :50]
    mask = torch.ones_like(batch)
    mask[0, :4] = 0
    assert torch.equal(ours(model, batch, attention_mask=mask), plain(model, batch, attention_mask=mask))
    assert hpc.last_report(model).reused_tokens == 100


@pytest.mark.parametrize(
    "name", ["qwen3_next", "falcon_h1", "lfm2", *(["mamba"] if CACHE_ARGUMENT == "cache" else [])]
)
def test_models_with_running_states_are_exact(name):
    model = RECURRENT_MODELS[name]()
    prompt = ids(1, 40)
    assert torch.equal(ours(model, prompt), plain(model, prompt))
    longer = torch.cat([prompt, ids(1, 5)], dim=1)
    assert torch.equal(ours(model, longer), plain(model, longer))
    assert hpc.last_report(model).reused_tokens == 40


def test_quantizing_options_are_refused_by_name():
    with pytest.raises(UnknownOptionError, match="'nbits', which 'prefix-offloaded' does not have"):
        ours(TINY_MODELS["llama"](), ids(1, 5), cache_config={"nbits": 4})
