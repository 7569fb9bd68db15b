"""Long prompts go through the model in chunks, in every strategy, and give what they give in one forward."""

import pytest
import torch

import hf_prefix_cache as hpc
from generation.oracles import counted, generated, pad_left, tokens
from hf_prefix_cache import forward
from recurrent_models import RECURRENT_MODELS

STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-offloaded")


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch):
    monkeypatch.setattr(forward, "_CHUNK", 16)
    monkeypatch.setattr(forward, "_FEWEST_COLUMNS", 4)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2", "llama4"])
def test_no_forward_of_a_prompt_has_more_tokens_than_a_chunk(name, strategy, tiny_model):
    model, prompt = tiny_model(name), tokens(1, 50)
    for ids in (prompt, torch.cat([prompt, tokens(1, 37, seed=1)], dim=1), tokens(3, 30, seed=2)):
        with counted(model) as count:
            output = generated(model, ids, cache_implementation=strategy)
        assert max(count.calls) <= 16
        assert torch.equal(output, generated(model, ids))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_padded_rows_go_in_chunks_too(strategy, tiny_model):
    model = tiny_model("llama")
    ids, mask = pad_left(tokens(1, 30)[0], tokens(1, 7, seed=1)[0])
    with counted(model) as count:
        output = generated(model, ids, attention_mask=mask, cache_implementation=strategy)
    assert max(count.calls) <= 16
    assert torch.equal(output, generated(model, ids, attention_mask=mask))


@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static", "prefix-offloaded", "prefix-quantized"])
def test_prefill_goes_in_chunks_and_loses_no_more_than_in_one_forward(strategy, tiny_model, monkeypatch):
    if strategy == "prefix-quantized":
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")
    model, prefix = tiny_model("llama"), tokens(1, 150)
    with counted(model) as count:
        chunked = hpc.PrefixCachedModel(model, strategy=strategy).prefill(prefix)
    assert max(count.calls) <= 16
    assert count.tokens == 150
    with torch.no_grad():
        expected = model(prefix).logits[:, -1]
    torch.testing.assert_close(chunked.next_logits, expected, atol=1e-4, rtol=0)
    monkeypatch.setattr(forward, "_CHUNK", 1000)
    whole = hpc.PrefixCachedModel(model, strategy=strategy, store=hpc.PrefixStore(max_bytes=10**9)).prefill(prefix)
    assert (whole.is_lossy, whole.compact().nbytes) == (chunked.is_lossy, chunked.compact().nbytes)
    for one, other in zip(chunked.to_cache().layers, whole.to_cache().layers, strict=True):
        torch.testing.assert_close(one.keys, other.keys, atol=2e-2 if whole.is_lossy else 1e-4, rtol=0)


def test_embeddings_and_outputs_of_the_whole_prompt_are_computed_in_one_forward(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 40)
    options = {"output_hidden_states": True, "return_dict_in_generate": True}
    output = generated(model, prompt, cache_implementation="prefix-dynamic", **options)
    expected = generated(model, prompt, **options)
    assert output.hidden_states[0][0].shape == expected.hidden_states[0][0].shape
    embeds = model.get_input_embeddings()(prompt).detach()
    with counted(model) as count:
        generated(model, inputs_embeds=embeds, cache_implementation="prefix-dynamic")
    assert count.calls[0] > 16


@pytest.mark.parametrize("name", ["mamba", "falcon_mamba"])
def test_models_that_take_single_tokens_behind_a_prefix_get_it_whole_or_but_for_the_last_one(name):
    model, prompt = RECURRENT_MODELS[name](), tokens(1, 40)
    if not hpc.compat.takes_cache(model):
        pytest.skip("Mamba's own classes take a cache of ours from Transformers 5.24 on")
    with counted(model) as count:
        prefix = hpc.PrefixCachedModel(model).prefill(prompt)
    assert count.tokens == 40
    assert len(count.calls) <= 2
    with torch.no_grad():
        torch.testing.assert_close(prefix.next_logits, model(prompt).logits[:, -1], atol=1e-4, rtol=0)
