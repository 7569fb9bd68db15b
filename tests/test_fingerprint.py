"""What a fingerprint sees: every change of weights and settings, at little cost, equal in every process."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hf_prefix_cache import fingerprint
from hf_prefix_cache.fingerprint import fingerprint_of, invalidate_fingerprint, same_architecture
from tiny_models import TINY_MODELS, build, gemma3_text, gpt2, llama


@pytest.fixture
def model():
    return llama()


def gradients(model):
    model.zero_grad()
    model(input_ids=torch.tensor([[1, 2, 3]])).logits.square().mean().backward()


def step_with(optimizer_class, **options):
    def change(model):
        gradients(model)
        optimizer_class(model.parameters(), lr=1e-2, **options).step()

    return change


def write_through_data(model):
    model.lm_head.weight.data.mul_(1.5)


def load_other_weights(model):
    model.load_state_dict(build(model.config, seed=5).state_dict())


def replace_a_parameter(model):
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight * 2)


def write_in_inference_mode(model):
    with torch.inference_mode():
        model.lm_head.weight.mul_(2)


CHANGES = {
    "in place": lambda model: torch.nn.init.zeros_(model.model.layers[0].mlp.up_proj.weight),
    "one value in place": lambda model: model.lm_head.weight.detach()[3, 5].add_(1e-3),
    "sgd": step_with(torch.optim.SGD),
    "adamw": step_with(torch.optim.AdamW),
    "adamw foreach": step_with(torch.optim.AdamW, foreach=True),
    "adamw fused": step_with(torch.optim.AdamW, fused=True),
    "load_state_dict": load_other_weights,
    "through .data": write_through_data,
    "a new parameter": replace_a_parameter,
    "in inference mode": write_in_inference_mode,
    "dtype": lambda model: model.to(torch.bfloat16),
    "attention": lambda model: model.set_attn_implementation("eager"),
    "configuration": lambda model: setattr(model.config, "rms_norm_eps", 1e-3),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(2),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_model_changes_the_fingerprint(model, change):
    before = fingerprint_of(model)
    assert fingerprint_of(model) == before
    CHANGES[change](model)
    assert fingerprint_of(model) != before


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_has_the_fingerprint_it_would_have_when_new(model, change):
    fingerprint_of(model)
    CHANGES[change](model)
    known = fingerprint_of(model)
    invalidate_fingerprint(model)
    assert fingerprint_of(model) == known


def test_weights_that_come_back_bring_their_fingerprint_back(model):
    before, weights = fingerprint_of(model), copy.deepcopy(model.state_dict())
    load_other_weights(model)
    assert fingerprint_of(model) != before
    model.load_state_dict(weights)
    assert fingerprint_of(model) == before


def test_a_single_write_through_data_has_to_be_told(model):
    before = fingerprint_of(model)
    model.lm_head.weight.data[3, 5] += 1
    invalidate_fingerprint(model)
    assert fingerprint_of(model) != before


def test_equal_models_have_equal_fingerprints_and_others_do_not():
    prints = {name: fingerprint_of(build_model()) for name, build_model in TINY_MODELS.items()}
    assert len(set(prints.values())) == len(prints)
    assert fingerprint_of(llama()) == prints["llama"]
    assert fingerprint_of(build(llama().config, seed=1)) != prints["llama"]
    assert all(len(value) == 64 and int(value, 16) for value in prints.values())


def test_how_a_model_is_called_does_not_matter(model):
    before = fingerprint_of(model)
    model.config.use_cache = False
    model.config._name_or_path = "elsewhere"
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert fingerprint_of(model) == before


def test_another_process_gives_equal_weights_an_equal_fingerprint():
    tests = Path(__file__).parent
    script = (
        f"import sys; sys.path.insert(0, {str(tests)!r})\n"
        "from tiny_models import gemma3_text\n"
        "from hf_prefix_cache.fingerprint import fingerprint_of\n"
        "print(fingerprint_of(gemma3_text()))\n"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split()[-1] == fingerprint_of(gemma3_text())


def test_training_mode_matters_only_where_something_drops_out(model):
    before = fingerprint_of(model)
    assert fingerprint_of(model.train()) == before
    dropping = gpt2()  # whose configuration drops a tenth
    before = fingerprint_of(dropping)
    assert fingerprint_of(dropping.train()) != before
    dropping.eval()
    dropping.transformer.h[0].train()
    assert fingerprint_of(dropping) != before
    assert fingerprint_of(dropping.eval()) == before


def test_a_model_built_in_inference_mode_has_the_fingerprint_of_its_weights(model):
    with torch.inference_mode():
        built = llama()
    assert fingerprint_of(built) == fingerprint_of(model)
    with torch.inference_mode():
        built.lm_head.weight.mul_(2)
    assert fingerprint_of(built) != fingerprint_of(model)


def test_repeated_calls_read_no_weights_again(model, monkeypatch):
    read = []
    monkeypatch.setattr(fingerprint, "_checksum", lambda tensor: read.append(tensor) or 0)
    fingerprint_of(model)
    tensors = len(list(model.parameters())) + len(list(model.buffers()))
    assert len(read) == tensors
    for _ in range(3):
        fingerprint_of(model)
        with torch.no_grad():
            model(input_ids=torch.tensor([[1, 2, 3]]))
    assert len(read) == tensors
    torch.nn.init.ones_(model.lm_head.weight)
    fingerprint_of(model)
    assert len(read) == 2 * tensors


def test_a_weight_that_is_not_a_number_is_no_change(model, monkeypatch):
    model.lm_head.weight.detach().fill_(torch.nan)
    before = fingerprint_of(model)
    monkeypatch.setattr(fingerprint, "_checksum", None)
    assert fingerprint_of(model) == before


def test_weights_on_the_meta_device_equal_only_themselves():
    with torch.device("meta"):
        first, second = llama(), llama()
    assert fingerprint_of(first) == fingerprint_of(first)
    assert fingerprint_of(first) != fingerprint_of(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool], ids=str)
@pytest.mark.parametrize("size", [1, 7, 1_000, 2**17 // 4 + 3])
def test_the_checksum_sees_every_single_value_and_every_swap_and_sign(dtype, size):
    tensor = torch.randn(size).to(dtype) if dtype.is_floating_point else torch.randint(0, 2, (size,)).to(dtype)
    tensor[0] = 1
    whole = fingerprint._checksum(tensor)
    assert whole == fingerprint._checksum(tensor.clone()) == fingerprint._checksum(tensor[None])
    for place in {0, size // 2, size - 1}:
        changed = tensor.clone()
        changed[place] = not changed[place] if dtype == torch.bool else -changed[place] + (changed[place] == 0)
        assert fingerprint._checksum(changed) != whole
    if dtype.is_floating_point:
        assert fingerprint._checksum(-tensor) != whole
    if size > 1:
        swapped = torch.arange(size) % 2
        assert fingerprint._checksum(swapped.to(dtype)) != fingerprint._checksum(swapped.flip(0).to(dtype)) or size % 2


def test_the_checksum_reads_views_that_start_anywhere():
    whole = torch.randn(100, dtype=torch.float32).bfloat16()
    for start in range(5):
        assert fingerprint._checksum(whole[start:]) == fingerprint._checksum(whole[start:].clone())
    square = torch.randn(8, 8)
    assert (
        fingerprint._checksum(square.T)
        == fingerprint._checksum(square.T.contiguous())
        != fingerprint._checksum(square)
    )


def test_an_empty_tensor_has_a_checksum():
    assert fingerprint._checksum(torch.zeros(0)) == fingerprint._checksum(torch.zeros(0))


def test_architectures_are_compared_by_what_decides_the_numbers():
    config = llama().config
    other = copy.deepcopy(config)
    other.use_cache, other.dtype, other._name_or_path = False, torch.bfloat16, "elsewhere"
    assert same_architecture(config, other)
    other.rope_parameters = {**other.rope_parameters, "rope_theta": 7.0}
    assert not same_architecture(config, other)
    assert not same_architecture(config, gemma3_text().config)
