"""Everything else that ``generate`` can do: equal to the uncached call, or refused by name."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig
from transformers.generation import EosTokenCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_prefix_cache as hpc
from generation.oracles import STRATEGIES, Checker, counted, generated, pad_left, tokens
from tiny_models import DECODER, build
from zoo.build import build_architecture

MODELS = ("llama", "mistral")


@pytest.fixture(params=[f"{name}-{strategy}" for name in MODELS for strategy in STRATEGIES])
def check(request, tiny_model):
    name, strategy = request.param.split("-", 1)
    return Checker(tiny_model(name), strategy)


class Recorder(BaseStreamer):
    def __init__(self):
        self.values, self.ended = [], False

    def put(self, value):
        self.values.append(value.reshape(-1).tolist())

    def end(self):
        self.ended = True


def test_streamers_get_the_same_tokens_in_the_same_order(check):
    prompt, expected = tokens(1, 12), Recorder()
    generated(check.model, prompt, streamer=expected)
    for _ in range(2):
        streamer = Recorder()
        generated(check.model, prompt, streamer=streamer, cache_implementation=check.strategy)
        assert streamer.values == expected.values
        assert streamer.ended
    assert check.report.reused_tokens == 11


def test_rows_end_at_different_times(check):
    prompts = tokens(3, 12)
    end = int(generated(check.model, prompts, max_new_tokens=8)[1, 14])
    options = {"max_new_tokens": 8, "eos_token_id": [end, 2], "pad_token_id": 0}
    for _ in range(2):
        check(prompts[:2], **options)
    check(prompts, num_beams=2, **options)


def test_stopping_criteria(check):
    class StopsAt(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 15)

    prompt = tokens(1, 12)
    for criteria in (StopsAt(), EosTokenCriteria(eos_token_id=int(generated(check.model, prompt)[0, 13]))):
        criteria = StoppingCriteriaList([criteria])
        output = check(prompt, stopping_criteria=criteria, pad_token_id=0)
        assert output.shape[1] < 17


def test_allowed_tokens(check):
    def allowed(row, ids):
        return [5 + (len(ids) + row) % 7, 40, 41]

    prompt = tokens(2, 12)
    for options in ({}, {"num_beams": 3}):
        check(prompt, prefix_allowed_tokens_fn=allowed, **options)
        check(prompt, prefix_allowed_tokens_fn=allowed, **options)


def test_logits_processors_that_look_at_the_prompt(check):
    options = {
        "repetition_penalty": 1.7,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[8], [9, 10]],
        "min_new_tokens": 3,
    }
    ids, mask = pad_left(tokens(18), torch.cat([tokens(10), tokens(3, seed=1)]))
    for _ in range(2):
        check(tokens(1, 18), **options)
        check(ids, attention_mask=mask, **options)


def test_guidance_without_a_prompt_of_its_own(check):
    for _ in range(2):
        output = generated(check.model, tokens(1, 12), guidance_scale=1.5, cache_implementation=check.strategy)
        assert torch.equal(output, generated(check.model, tokens(1, 12), guidance_scale=1.5))


@pytest.mark.parametrize("flag", ["output_hidden_states", "output_attentions"])
def test_outputs_of_the_whole_prompt_are_computed_for_the_whole_prompt(check, flag):
    check.model.set_attn_implementation("eager")
    options, prompt = {flag: True, "return_dict_in_generate": True}, tokens(1, 12)
    name = flag.removeprefix("output_")
    expected = generated(check.model, prompt, **options)
    for _ in range(2):
        output = generated(check.model, prompt, cache_implementation=check.strategy, **options)
        for ours, theirs in zip(output[name], expected[name], strict=True):
            for one, other in zip(ours, theirs, strict=True):
                if check.strategy == "prefix-static" and name == "attentions":
                    one = one[..., : other.shape[-1]]  # static buffers are longer than what they hold
                torch.testing.assert_close(one, other, atol=1e-4, rtol=0)
        assert flag in check.report.reason


def test_output_classes_are_those_of_transformers(check):
    prompt = tokens(1, 12)
    for options in ({}, {"num_beams": 2}, {"num_beams": 2, "output_scores": True}):
        options = {"return_dict_in_generate": True, **options}
        expected = generated(check.model, prompt, **options)
        output = generated(check.model, prompt, cache_implementation=check.strategy, **options)
        assert type(output) is type(expected)
        assert list(output) == list(expected)


def test_position_ids_of_the_caller_are_used_and_nothing_is_reused(check):
    prompt, positions = tokens(1, 12), torch.arange(3, 15)[None]
    check(prompt)
    check(prompt, position_ids=positions, reused=0)
    assert "position_ids" in check.report.reason
    check(prompt, position_ids=torch.arange(12)[None], reused=11)


def test_masks_with_holes_or_padding_on_the_right_reuse_nothing(check):
    prompt = tokens(1, 12)
    check(prompt)
    for hole in (4, 11):
        mask = torch.ones_like(prompt)
        mask[0, hole] = 0
        check(prompt, attention_mask=mask, reused=0)
        assert "padding" in check.report.reason
    check(prompt, reused=11)


def test_a_call_that_fits_max_cache_len_gets_a_cache_of_that_length(tiny_model):
    model = tiny_model("llama")
    options = {"max_cache_len": 50, "return_dict_in_generate": True, "cache_implementation": "prefix-static"}
    for length in (8, 20):
        output = generated(model, tokens(1, length), **options)
        cache = output[hpc.compat.CACHE_ARGUMENT]
        assert cache.get_max_length() == 50
        assert torch.equal(output.sequences, generated(model, tokens(1, length)))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt2", "llama4"])
def test_prompt_lookup_starts_behind_the_prefix(name, tiny_model):
    check = Checker(tiny_model(name), "prefix-dynamic")
    repeated = tokens(1, 9).repeat(1, 3)
    options = {"prompt_lookup_num_tokens": 3, "max_new_tokens": 12}
    answer = check(repeated, reused=0, **options)
    following = torch.cat([answer, tokens(1, 4, seed=1)], dim=1)
    with counted(check.model) as count:
        generated(check.model, following, cache_implementation="prefix-dynamic", **options)
    assert max(count.calls) <= 5 + 3  # the new tokens with the first drafts, not the prompt
    check(following, **options)
    check(torch.cat([repeated, tokens(1, 5, seed=2)], dim=1), **options)


def assistant():
    return build(LlamaConfig(**{**DECODER, "num_hidden_layers": 1}), seed=3)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("assistant_name", [None, "prefix-dynamic", "prefix-static"])
def test_assisted_decoding_with_and_without_a_name_on_the_assistant(name, assistant_name, tiny_model):
    model, helper = tiny_model(name), assistant()
    helper.generation_config.cache_implementation = assistant_name
    check, prompt = Checker(model, "prefix-dynamic"), tokens(1, 14)
    expected = generated(model, prompt, max_new_tokens=10)
    for reused in (0, 13):
        output = generated(
            model, prompt, assistant_model=helper, max_new_tokens=10, cache_implementation="prefix-dynamic"
        )
        assert torch.equal(output, expected)
        assert check.report.reused_tokens == reused
    following = torch.cat([expected, tokens(1, 6, seed=1)], dim=1)
    output = generated(model, following, assistant_model=helper, cache_implementation="prefix-dynamic")
    assert torch.equal(output, generated(model, following))
    assert check.report.reused_tokens == expected.shape[1] - 1
    assert len(hpc.store_for(helper)) == 0


def test_assisted_sampling_with_the_model_itself_as_assistant(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 14)
    options = {"assistant_model": tiny_model("llama"), "do_sample": True, "max_new_tokens": 8}
    expected = generated(model, prompt, **options)
    for _ in range(2):
        output = generated(model, prompt, cache_implementation="prefix-dynamic", **options)
        assert torch.equal(output, expected)
    assert hpc.last_report(model).reused_tokens == 13


def test_drafts_on_a_padded_prompt_are_verified_afresh(tiny_model):
    model = tiny_model("llama")
    ids, mask = pad_left(tokens(16), tokens(12))
    for _ in range(2):
        options = {"attention_mask": mask[1:], "prompt_lookup_num_tokens": 2}
        output = generated(model, ids[1:], cache_implementation="prefix-dynamic", **options)
        assert torch.equal(output, generated(model, ids[1:], attention_mask=mask[1:]))
    assert "padded" in hpc.last_report(model).reason


def test_static_caches_take_drafts_back_where_there_are_no_windows(tiny_model):
    check = Checker(tiny_model("llama"), "prefix-static")
    for reused in (0, 26):
        check(tokens(1, 9).repeat(1, 3), prompt_lookup_num_tokens=3, max_new_tokens=9, reused=reused)
    with pytest.raises(hpc.UnsupportedModelError, match=r"windows.*'prefix-dynamic' for assisted"):
        generated(
            tiny_model("mistral"), tokens(1, 12), prompt_lookup_num_tokens=3, cache_implementation="prefix-static"
        )


def test_a_custom_decoding_loop_works_without_reuse(tiny_model):
    def last_token_again(model, input_ids, **kwargs):
        return torch.cat([input_ids, input_ids[:, -1:]], dim=1)

    model, prompt = tiny_model("llama"), tokens(1, 6)
    output = generated(model, prompt, custom_generate=last_token_again, cache_implementation="prefix-dynamic")
    assert torch.equal(output, torch.cat([prompt, prompt[:, -1:]], dim=1))
    assert len(hpc.store_for(model)) == 0


def test_without_a_cache_a_name_changes_nothing_and_the_report_says_so(tiny_model):
    model, prompt = tiny_model("llama"), tokens(2, 8)
    output = generated(model, prompt, use_cache=False, cache_implementation="prefix-dynamic")
    assert torch.equal(output, generated(model, prompt))
    report = hpc.last_report(model)
    assert (report.reason, report.prompt_tokens, report.reused_tokens) == ("use_cache is False", 16, 0)


def test_an_empty_prompt_starts_from_the_first_token_as_in_transformers(check):
    check.model.generation_config.bos_token_id = 1
    output = generated(check.model, cache_implementation=check.strategy)
    assert torch.equal(output, generated(check.model))


def test_models_of_other_positions_share_prefixes_in_padded_batches():
    model = build(GPT2Config(vocab_size=99, n_embd=32, n_layer=1, n_head=2, n_positions=64, eos_token_id=None))
    check, prefix = Checker(model, "prefix-dynamic"), tokens(12)
    ids, mask = pad_left(torch.cat([prefix, tokens(3, seed=1)]), torch.cat([prefix, tokens(6, seed=2)]))
    check(ids, attention_mask=mask)
    check(ids, attention_mask=mask, reused=24)


@pytest.mark.parametrize("name", ["gpt_neo", "inkling_text", "moshi"])
def test_prefix_auto_serves_models_that_have_no_static_buffers(name):
    model, prompt = build_architecture(name), tokens(1, 9)
    for _ in range(2):
        output = generated(model, prompt, cache_implementation="prefix-auto")
        assert torch.equal(output, generated(model, prompt, use_cache=False))
    assert hpc.last_report(model).strategy == "prefix-dynamic"
    with pytest.raises(hpc.UnsupportedModelError, match="use prefix-dynamic"):
        generated(model, prompt, cache_implementation="prefix-static")
