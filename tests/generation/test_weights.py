"""Nothing computed with other weights, or at random, is used."""

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, MixtralConfig

import hf_prefix_cache as hpc
from generation.oracles import STRATEGIES, Checker, counted, generated, tokens
from tiny_models import COMMON, DECODER, build


def change_in_place(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)


def change_through_data(model):
    model.model.layers[0].self_attn.k_proj.weight.data.mul_(1.5)


def take_an_optimizer_step(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    model(input_ids=tokens(1, 8), labels=tokens(1, 8)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def load_other_weights(model):
    model.load_state_dict(build(model.config, seed=9).state_dict())


def replace_a_parameter(model):
    layer = model.model.layers[0].self_attn.v_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 0.5)


def other_attention(model):
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "change",
    [
        change_in_place,
        change_through_data,
        take_an_optimizer_step,
        load_other_weights,
        replace_a_parameter,
        other_attention,
    ],
)
def test_after_a_change_of_the_model_prompts_are_computed_anew(change, strategy, tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 16)
    Checker(model, strategy)(prompt, reused=0)
    change(model)
    check = Checker(model, strategy)
    check(prompt, reused=0)
    check(prompt, reused=15)


def test_invalidate_is_for_changes_that_nothing_shows(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 16)
    Checker(model, "prefix-dynamic")(prompt)
    model.model.layers[0].self_attn.k_proj.weight.data[1, 3] += 50
    hpc.invalidate(model)
    Checker(model, "prefix-dynamic")(prompt, reused=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_mode_without_dropout_reuses(strategy, tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 16)
    Checker(model, strategy)(prompt)
    model.train()
    Checker(model, strategy)(prompt, reused=15)
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def dropping_llama():
    return build(LlamaConfig(**DECODER, attention_dropout=0.3))


def dropping_gpt2():
    return build(GPT2Config(**COMMON, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.3))


def jittering_mixtral():
    return build(MixtralConfig(**DECODER, num_local_experts=2, router_jitter_noise=0.3))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("make", [dropping_llama, dropping_gpt2, jittering_mixtral])
def test_training_mode_with_dropout_reuses_nothing_and_draws_the_same_numbers(make, strategy):
    model, prompt = make(), tokens(1, 16)
    Checker(model, strategy)(prompt)
    model.train()
    # Static buffers draw dropout for all of their places, so they are compared with Transformers' own.
    plain = {"cache_implementation": "static"} if strategy == "prefix-static" else {}
    for ids in (prompt, torch.cat([tokens(1, 36).expand(3, -1), tokens(3, 4)], dim=1)):
        expected = generated(model, ids, **plain)
        for _ in range(2):
            assert torch.equal(generated(model, ids, cache_implementation=strategy), expected)
            assert hpc.last_report(model).reused_tokens == 0
            assert "training mode" in hpc.last_report(model).reason
    model.eval()
    Checker(model, strategy)(prompt, reused=15)  # what was computed in evaluation mode still holds


def test_gradients_of_a_later_training_step_are_those_of_a_model_that_never_generated(tiny_model):
    used, fresh, prompt = tiny_model("llama"), tiny_model("llama"), tokens(1, 16)
    generated(used, prompt, cache_implementation="prefix-dynamic")
    for model in (used, fresh):
        model(input_ids=prompt, labels=prompt).loss.backward()
    for one, other in zip(used.parameters(), fresh.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_generation_in_inference_mode_serves_calls_outside_of_it(tiny_model):
    check, prompt = Checker(tiny_model("llama"), "prefix-dynamic"), tokens(1, 16)
    with torch.inference_mode():
        check(prompt, reused=0)
    check(prompt, reused=15)
    check(torch.cat([prompt, tokens(1, 4, seed=1)], dim=1), reused=16)
    with torch.inference_mode():
        check(prompt, reused=15)


def test_two_models_of_one_shape_share_nothing(tiny_model):
    one, prompt = tiny_model("llama"), tokens(1, 16)
    other = build(one.config, seed=9)
    store = hpc.PrefixStore(max_bytes=10_000_000)
    hpc.set_store(one, store)
    hpc.set_store(other, store)
    Checker(one, "prefix-dynamic")(prompt, reused=0)
    Checker(other, "prefix-dynamic")(prompt, reused=0)
    assert len(store) == 2
    twin = tiny_model("llama")
    hpc.set_store(twin, store)
    with counted(twin) as count:
        generated(twin, prompt, cache_implementation="prefix-static")
    assert count.calls[0] == 1  # the same weights and settings: the same prefix


def test_what_was_computed_under_autocast_serves_only_there(tiny_model):
    check, prompt = Checker(tiny_model("llama"), "prefix-dynamic"), tokens(1, 16)
    half = Checker(check.model, "prefix-dynamic")
    for reused in (0, 15):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half(prompt, reused=reused)
        check(prompt, reused=reused)
