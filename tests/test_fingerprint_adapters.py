"""Adapters: what acts is in the fingerprint, what does not act is not, and switching reads no weights again."""

import pytest
import torch

from hf_prefix_cache import fingerprint
from hf_prefix_cache.exceptions import FingerprintMismatchError
from hf_prefix_cache.fingerprint import fingerprint_of, invalidate_fingerprint
from tiny_models import llama

peft = pytest.importorskip("peft")

# What PEFT asks of Transformers has another name from 5.24 on.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def config(**changes):
    given = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return peft.LoraConfig(task_type="CAUSAL_LM", **{**given, **changes})


@pytest.fixture
def base():
    return llama()


@pytest.fixture
def model(base):
    """A Llama with the adapters ``first``, which acts, and ``second``."""
    wrapped = peft.get_peft_model(base, config(), adapter_name="first")
    wrapped.add_adapter("second", config())
    return wrapped.eval()


@torch.no_grad()
def logits(model):
    return model(input_ids=IDS).logits


def rescale(model, scale):
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["first"] = scale


def test_every_state_of_the_adapters_has_a_fingerprint_of_its_own(model):
    layers = model.base_model.model
    found = {"first": fingerprint_of(layers)}
    model.set_adapter("second")
    found["second"] = fingerprint_of(layers)
    model.base_model.set_adapter(["first", "second"])
    found["both"] = fingerprint_of(layers)
    model.base_model.set_adapter(["second", "first"])
    found["both, the other way round"] = fingerprint_of(layers)
    model.set_adapter("first")
    rescale(model, 0.5)
    found["first, scaled"] = fingerprint_of(layers)
    rescale(model, 2.0)
    assert fingerprint_of(layers) == found["first"]
    model.merge_adapter()
    found["first, merged"] = fingerprint_of(layers)
    with model.disable_adapter():
        found["none"] = fingerprint_of(layers)
    assert len(set(found.values())) == len(found)


def test_switching_reads_no_weights_again(model, monkeypatch):
    layers = model.base_model.model
    states = [lambda: model.set_adapter("first"), lambda: model.set_adapter("second")]
    known = [(state(), fingerprint_of(layers))[1] for state in states]
    read, checksum = [], fingerprint.tensor_checksum
    monkeypatch.setattr(fingerprint, "tensor_checksum", lambda tensor: read.append(tensor) or checksum(tensor))
    assert [(state(), fingerprint_of(layers))[1] for state in states] == known
    assert not read


def test_switched_off_adapters_leave_the_fingerprint_of_the_base_model(base):
    plain = fingerprint_of(base)
    model = peft.get_peft_model(base, config()).eval()
    assert fingerprint_of(model) != plain
    assert fingerprint_of(model, without_adapters=True) == plain
    with model.disable_adapter():
        assert fingerprint_of(model) == plain
    assert fingerprint_of(model) != plain
    assert fingerprint_of(model.unload()) == plain


def test_the_wrapper_has_the_fingerprint_of_what_it_wraps(model):
    assert fingerprint_of(model) == fingerprint_of(model.base_model.model)
    fingerprint_of(model)
    invalidate_fingerprint(model)
    assert fingerprint_of(model) == fingerprint_of(model.base_model.model)


def test_virtual_tokens_are_the_wrappers_own(base):
    prompted = peft.get_peft_model(base, peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert fingerprint_of(prompted) != fingerprint_of(base)


def test_a_merge_and_what_takes_it_back_are_changes_of_the_weights(model):
    before, adapted = fingerprint_of(model), logits(model)
    model.merge_adapter()
    merged = fingerprint_of(model)
    torch.testing.assert_close(logits(model), adapted, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    known = fingerprint_of(model)
    assert len({before, merged, known}) >= 2  # taking a merge back may leave the last bit of a weight another one
    invalidate_fingerprint(model)
    assert fingerprint_of(model) == known


def test_merged_weights_that_are_switched_off_are_not_taken_for_merged_ones(model):
    model.merge_adapter()
    merged = fingerprint_of(model)
    with model.disable_adapter():
        assert fingerprint_of(model) != merged
        logits(model)  # takes the merge back


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_on_the_acting_adapter_is_a_change_and_one_on_another_is_none(model, fused):
    layers = model.base_model.model
    before = fingerprint_of(layers)
    other = [tensor for name, tensor in model.named_parameters() if ".second." in name]
    with torch.no_grad():
        for tensor in other:
            tensor.add_(1)
    assert fingerprint_of(layers) == before
    model(input_ids=IDS).logits.square().mean().backward()
    own = [tensor for name, tensor in model.named_parameters() if ".first." in name]
    torch.optim.AdamW(own, lr=1e-2, fused=fused).step()
    assert fingerprint_of(layers) != before


def test_one_value_of_an_adapter_through_data_is_seen(model):
    before = fingerprint_of(model)
    model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["first"].weight.data[1, 17] += 1e-3
    assert fingerprint_of(model) != before


def test_a_layer_that_is_trained_beside_the_adapter_is_part_of_it(base):
    plain = fingerprint_of(base)
    model = peft.get_peft_model(base, config(modules_to_save=["lm_head"])).eval()
    before = fingerprint_of(model)
    copied = model.base_model.model.lm_head
    with torch.no_grad():
        copied.original_module.weight.add_(1)
    assert fingerprint_of(model) == before
    with torch.no_grad():
        copied.original_module.weight.sub_(1)
        copied.modules_to_save["default"].weight.add_(1)
    assert fingerprint_of(model) != before
    with model.disable_adapter():
        off = fingerprint_of(model)
        copied.original_module.weight.data.copy_(llama().lm_head.weight)
    assert off != before
    assert fingerprint_of(model, without_adapters=True) == plain


def test_an_adapter_loaded_in_another_process_has_the_same_fingerprint(model, tmp_path):
    model.save_pretrained(tmp_path, selected_adapters=["first"])
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path / "first", adapter_name="first").eval()
    assert fingerprint_of(loaded) == fingerprint_of(model)


def test_an_adapter_that_acts_later_takes_the_base_models_prefix_only_if_asked_by_name(base, tmp_path):
    import hf_prefix_cache as hpc
    from hf_prefix_cache.compat import cache_argument

    ids = torch.tensor([[11, 12, 13, 14, 15, 16, 40, 41, 17, 18]])
    cut = 6  # the adapter begins to act with the tokens 40, 41
    prefix = hpc.PrefixCachedModel(base).prefill(ids[:, :cut])
    prefix.save(tmp_path / "base.safetensors")
    model = peft.get_peft_model(base, config(alora_invocation_tokens=[40, 41])).eval()
    with torch.no_grad():
        expected = model(input_ids=ids).logits[:, cut:]
        changed = (expected - llama()(input_ids=ids).logits[:, cut:]).abs().max()
    assert changed > 1e-2
    for wrong in (
        lambda: prefix.verify(model),
        lambda: hpc.PrefixSnapshot.load(tmp_path / "base.safetensors", model=model),
    ):
        with pytest.raises(FingerprintMismatchError, match="allow_base=True"):
            wrong()
    prefix.verify(model, allow_base=True)
    loaded = hpc.PrefixSnapshot.load(tmp_path / "base.safetensors", model=model, allow_base=True)
    with torch.no_grad():
        found = model(input_ids=ids[:, cut:], **cache_argument(loaded.to_cache())).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
