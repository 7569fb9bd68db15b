"""``cache_config``, generation configurations, registration, and what is left alone."""

import warnings

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, LlamaForCausalLM
from transformers.generation import configuration_utils

import hf_prefix_cache as hpc
from generation.oracles import STRATEGIES, Checker, counted, generated, tokens


def test_reuse_can_be_switched_off_for_a_call(tiny_model):
    check, prompt = Checker(tiny_model("llama"), "prefix-dynamic"), tokens(1, 12)
    check(prompt, cache_config={"reuse": False}, reused=0)
    assert len(hpc.store_for(check.model)) == 0  # neither read
    check(prompt)
    check(prompt, cache_config={"reuse": False}, reused=0)  # nor written
    assert "switched off" in check.report.reason
    check(prompt, cache_config={"reuse": True}, reused=11)


def test_tenants_share_nothing(tiny_model):
    check, prompt = Checker(tiny_model("llama"), "prefix-dynamic"), tokens(1, 12)
    check(prompt, cache_config={"namespace": "a"}, reused=0)
    check(prompt, cache_config={"namespace": "b"}, reused=0)
    check(prompt, reused=0)
    for namespace in ("a", "b", ""):
        check(prompt, cache_config={"namespace": namespace}, reused=11)
    rows = torch.cat([tokens(1, 40, seed=7).expand(2, -1), tokens(2, 3)], dim=1)
    check(rows, cache_config={"namespace": "a"}, reused=40)  # what rows compute together belongs to the tenant too
    check(rows[:1, :41], cache_config={"namespace": "b"}, reused=0)


@pytest.mark.parametrize(
    ("cache_config", "message"),
    [
        ({"reuse": 1}, r"cache_config\['reuse'\] is 1; it must be a bool"),
        ({"reuse": None}, r"cache_config\['reuse'\] is None"),
        ({"namespace": 3}, r"cache_config\['namespace'\] is 3; it must be a str"),
        ({"nbits": 4}, "cache_config has 'nbits', which .* does not have; the options are 'reuse' and 'namespace'"),
        ({"max_cache_len": 64}, "max_cache_len is an argument of generate"),
        ({1: 2}, "cache_config has 1"),
        (["reuse"], "it must be a dict"),
    ],
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_options_that_do_not_exist_are_refused_and_change_nothing(cache_config, message, strategy, tiny_model):
    check, prompt = Checker(tiny_model("llama"), strategy), tokens(1, 12)
    check(prompt)
    before = check.report
    with pytest.raises(hpc.UnknownOptionError, match=message):
        generated(check.model, prompt, cache_implementation=strategy, cache_config=cache_config)
    assert check.report is before
    check(prompt, reused=11)


def test_the_dict_of_the_user_is_never_changed(tiny_model):
    model, options = tiny_model("llama"), {"namespace": "a", "reuse": True}
    config = GenerationConfig(cache_implementation="prefix-static", cache_config=options, max_new_tokens=3)
    before = config.to_dict()
    for _ in range(2):
        model.generate(tokens(1, 8), generation_config=config)
        generated(model, tokens(1, 8), cache_implementation="prefix-dynamic", cache_config=options)
    assert options == {"namespace": "a", "reuse": True}
    assert config.to_dict() == before


@pytest.mark.parametrize("strategy", hpc.validation.STRATEGIES)
def test_a_generation_config_validates_saves_and_loads(strategy, tmp_path):
    options = {"reuse": False, "namespace": "a"}
    config = GenerationConfig(cache_implementation=strategy, cache_config=options, max_new_tokens=4, do_sample=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        config.validate(strict=True)
        config.save_pretrained(tmp_path)
        loaded = GenerationConfig.from_pretrained(tmp_path)
    assert loaded.to_dict() == config.to_dict()
    assert (loaded.cache_implementation, loaded.cache_config) == (strategy, options)


def test_max_cache_len_goes_with_the_static_strategy_without_a_warning(caplog):
    GenerationConfig(cache_implementation="prefix-static", max_cache_len=64).validate(strict=True)
    GenerationConfig(cache_implementation="prefix-auto", max_cache_len=64).validate(strict=True)
    assert not caplog.records


@pytest.mark.parametrize("strategy", [*STRATEGIES, "prefix-auto"])
def test_a_model_folder_carries_the_name(strategy, tiny_model, tmp_path):
    model, prompt = tiny_model("llama"), tokens(1, 12)
    expected = generated(model, prompt)
    model.generation_config.cache_implementation = strategy
    model.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert loaded.generation_config.cache_implementation == strategy
    for reused in (0, 11):
        assert torch.equal(generated(loaded, prompt), expected)
        assert hpc.last_report(loaded).reused_tokens == reused


def test_a_generation_config_object_names_the_strategy(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 12)
    plain = GenerationConfig(max_new_tokens=5, do_sample=False)
    ours = GenerationConfig(max_new_tokens=5, do_sample=False, cache_implementation="prefix-static")
    for reused in (0, 11):
        output = model.generate(prompt, generation_config=ours)
        assert torch.equal(output, model.generate(prompt, generation_config=plain))
        assert hpc.last_report(model).reused_tokens == reused


@pytest.mark.parametrize("name", [None, "dynamic", "static", "offloaded_static"])
def test_calls_that_name_no_prefix_strategy_go_through_transformers_untouched(name, tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 12)
    Checker(model, "prefix-dynamic")(prompt)
    store, report = len(hpc.store_for(model)), hpc.last_report(model)
    options = {} if name is None or name.startswith("offloaded") else {"cache_implementation": name}
    with counted(model) as count:
        output = generated(model, prompt, return_dict_in_generate=True, **options)
    assert count.calls[0] == 12
    assert not isinstance(output[hpc.compat.CACHE_ARGUMENT], hpc.PrefixCache)
    assert len(hpc.store_for(model)) == store
    assert hpc.last_report(model) is report


def test_the_cache_config_of_others_is_left_to_them(tiny_model):
    output = generated(tiny_model("llama"), tokens(1, 12), cache_config={"something": "else"})
    assert output.shape[1] > 12


@pytest.mark.parametrize("name", ["prefix-dynamik", "prefix", "Prefix-Dynamic", "prefix_static"])
def test_unknown_names_raise_as_in_transformers_and_the_message_lists_ours(name, tiny_model):
    with pytest.raises(ValueError, match=f"Invalid `cache_implementation` \\({name}\\).*prefix-dynamic"):
        generated(tiny_model("llama"), tokens(1, 4), cache_implementation=name)


def test_registering_is_idempotent_and_can_be_taken_back(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 8)
    ours = GenerationMixin.generate
    names = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    hpc.register()
    assert GenerationMixin.generate is ours
    assert configuration_utils.ALL_CACHE_IMPLEMENTATIONS is names
    try:
        hpc.unregister()
        hpc.unregister()
        for name in ("generate", "_prefill", "_prepare_cache_for_generation", "prepare_inputs_for_generation"):
            assert "hf_prefix_cache" not in getattr(GenerationMixin, name).__code__.co_filename
        assert not set(configuration_utils.ALL_CACHE_IMPLEMENTATIONS) & set(hpc.validation.STRATEGIES)
        assert not set(configuration_utils.ALL_STATIC_CACHE_IMPLEMENTATIONS) & set(hpc.validation.STRATEGIES)
        with pytest.raises(ValueError, match="Invalid `cache_implementation`"):
            generated(model, prompt, cache_implementation="prefix-dynamic")
        plain = generated(model, prompt)
    finally:
        hpc.register()
    assert names == configuration_utils.ALL_CACHE_IMPLEMENTATIONS
    assert torch.equal(generated(model, prompt, cache_implementation="prefix-dynamic"), plain)
