"""What a fingerprint sees: every change of weights and settings, at little cost, equal in every process."""

import copy
import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from hf_prefix_cache import fingerprint
from hf_prefix_cache.fingerprint import fingerprint_of, invalidate_fingerprint, same_architecture
from hf_prefix_cache.samples import Samples
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


def widen_through_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data.double()


def turn_round_through_data(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


def repeat_a_row_through_data(model):
    model.lm_head.weight.data = model.lm_head.weight.data[:1].expand_as(model.lm_head.weight)


def scale_rotary_positions(model):
    model.config.rope_parameters["factor"] = 4.0


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
    "a whole weight through .data of another size": widen_through_data,
    "a square weight turned round": turn_round_through_data,
    "one row for all": repeat_a_row_through_data,
    "more tokens": lambda model: model.resize_token_embeddings(120),
    "rotary scaling": scale_rotary_positions,
    "a new module": lambda model: setattr(model, "lm_head", torch.nn.Linear(32, 99, bias=False)),
    "precision of products": lambda model: torch.set_float32_matmul_precision("high"),
}


@pytest.fixture(autouse=True)
def _precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


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
    monkeypatch.setattr(fingerprint, "tensor_checksum", lambda tensor: read.append(tensor) or 0)
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
    assert len(read) == tensors + 1  # the others have not changed


def test_a_weight_that_is_not_a_number_is_no_change(model, monkeypatch):
    model.lm_head.weight.detach().fill_(torch.nan)
    before = fingerprint_of(model)
    monkeypatch.setattr(fingerprint, "tensor_checksum", None)
    assert fingerprint_of(model) == before


def test_weights_on_the_meta_device_equal_only_themselves():
    with torch.device("meta"):
        first, second = llama(), llama()
    assert fingerprint_of(first) == fingerprint_of(first)
    assert fingerprint_of(first) != fingerprint_of(second)


def test_architectures_are_compared_by_what_decides_the_numbers():
    config = llama().config
    other = copy.deepcopy(config)
    other.use_cache, other.dtype, other._name_or_path = False, torch.bfloat16, "elsewhere"
    assert same_architecture(config, other)
    other.rope_parameters = {**other.rope_parameters, "rope_theta": 7.0}
    assert not same_architecture(config, other)
    assert not same_architecture(config, gemma3_text().config)


def test_the_copy_of_a_model_has_its_fingerprint_until_one_weight_differs(model):
    other = copy.deepcopy(model)
    assert fingerprint_of(other) == fingerprint_of(model)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight[-1, -1] += 1e-6
    assert fingerprint_of(other) != fingerprint_of(model)


def test_a_model_that_was_saved_and_loaded_has_the_same_fingerprint(model, tmp_path):
    model.save_pretrained(tmp_path)
    assert fingerprint_of(type(model).from_pretrained(tmp_path)) == fingerprint_of(model)


def test_weights_that_moved_away_and_back_have_the_same_fingerprint(model):
    before = fingerprint_of(model)
    assert fingerprint_of(model.double()) != before
    assert fingerprint_of(model.float()) == before


def test_what_is_known_of_a_model_keeps_none_of_its_tensors_alive():
    model = llama()
    fingerprint_of(model)
    parts = [weakref.ref(model.lm_head), weakref.ref(model.lm_head.weight), weakref.ref(model.model.layers[0])]
    model.lm_head = torch.nn.Linear(32, 99, bias=False)
    gc.collect()
    assert [part() is None for part in parts] == [True, True, False]
    del model
    gc.collect()
    assert parts[2]() is None


def test_the_memory_of_a_weight_that_moves_in_the_middle_of_a_look_is_there_until_it_was_read(model, monkeypatch):
    weight, read = model.lm_head.weight, Samples.read
    values = weight.detach().numpy().copy()
    memory = weakref.ref(values)
    weight.data = torch.from_numpy(values)
    del values
    fingerprint_of(model)

    def read_after_a_move(samples, tensors):
        weight.data = torch.zeros_like(weight.data)  # as another thread may do
        assert memory() is not None
        return read(samples, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(Samples, "read", read_after_a_move)
        fingerprint_of(model)
    known = fingerprint_of(model)
    assert memory() is None
    invalidate_fingerprint(model)
    assert fingerprint_of(model) == known


def test_the_steps_of_another_models_optimizer_change_nothing(model, monkeypatch):
    before, other = fingerprint_of(model), build(model.config, seed=3)
    monkeypatch.setattr(fingerprint, "tensor_checksum", None)
    optimizer = torch.optim.AdamW(other.parameters(), fused=True)
    gradients(other)
    optimizer.step()
    assert fingerprint_of(model) == before


def test_only_what_an_optimizer_holds_is_read_again_after_its_step(model, monkeypatch):
    fingerprint_of(model)
    gradients(model)
    optimizer = torch.optim.AdamW([model.lm_head.weight], fused=True)
    read, checksum = [], fingerprint.tensor_checksum
    monkeypatch.setattr(fingerprint, "tensor_checksum", lambda tensor: read.append(tensor.shape) or checksum(tensor))
    optimizer.step()
    known = fingerprint_of(model)
    assert read == [model.lm_head.weight.shape]
    invalidate_fingerprint(model)
    assert fingerprint_of(model) == known


def test_the_step_of_an_optimizer_that_is_gone_is_noticed(model):
    before = fingerprint_of(model)
    gradients(model)
    torch.optim.AdamW([model.lm_head.weight], fused=True, lr=1e-2).step()
    assert fingerprint_of(model) != before


def test_the_step_of_an_eight_bit_optimizer_is_noticed(model):
    optimizers = pytest.importorskip("bitsandbytes").optim
    before = fingerprint_of(model)
    gradients(model)
    optimizer = optimizers.AdamW8bit(model.parameters(), lr=1e-2, min_8bit_size=64)
    try:
        optimizer.step()
    except (NotImplementedError, RuntimeError, AttributeError) as error:
        pytest.skip(f"this bitsandbytes has no 8-bit optimizer for this device: {error}")
    known = fingerprint_of(model)
    assert known != before
    invalidate_fingerprint(model)
    assert fingerprint_of(model) == known


def quantized_to_four_bits(scale=1.0):
    nn = pytest.importorskip("bitsandbytes").nn
    model = llama()
    for layer in model.model.layers:
        old = layer.mlp.up_proj
        layer.mlp.up_proj = nn.Linear4bit(
            old.in_features, old.out_features, bias=False, quant_type="nf4", compute_dtype=torch.float32
        )
        layer.mlp.up_proj.weight = nn.Params4bit(old.weight.data * scale, requires_grad=False, quant_type="nf4").to(
            "cpu"
        )
    return model


def test_quantized_weights_have_the_fingerprint_of_their_scales_too():
    model, same, scaled = quantized_to_four_bits(), quantized_to_four_bits(), quantized_to_four_bits(scale=2.0)
    ours, theirs = (found.model.layers[0].mlp.up_proj.weight for found in (model, scaled))
    assert torch.equal(ours.data, theirs.data)  # the codes are equal: only the scales differ
    assert fingerprint_of(model) == fingerprint_of(same) != fingerprint_of(llama())
    assert fingerprint_of(model) != fingerprint_of(scaled)


def test_a_forward_leaves_the_fingerprint_of_quantized_weights():
    model = quantized_to_four_bits()
    before = fingerprint_of(model)
    with torch.no_grad():
        model(input_ids=torch.tensor([[1, 2, 3]]))
    assert fingerprint_of(model) == before
    ours = model.model.layers[0].mlp.up_proj.weight.quant_state
    ours.absmax.mul_(2)
    assert fingerprint_of(model) != before
