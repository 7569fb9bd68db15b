"""A layer kind of the user's own, taught to the package as docs/your_own_layer_kind.md says."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, DynamicLayer

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import CACHE_ARGUMENT
from tiny_models import DECODER


class EchoLayer(DynamicLayer):
    """Keys and values, and for each token the embedding that it had."""

    _layer_type = "echo_attention"

    def __init__(self, **kwargs):
        super().__init__()
        self.echo = None

    def add_echo(self, embeddings):
        self.echo = embeddings if self.echo is None else torch.cat([self.echo, embeddings], dim=1)
        return self.echo


class TotalLayer(DynamicLayer):
    """Keys and values, and the sum of all embeddings, which is written in place."""

    _layer_type = "total_attention"

    def __init__(self, **kwargs):
        super().__init__()
        self.total = None

    def add_echo(self, embeddings):
        before = torch.zeros_like(embeddings[:, :1]) if self.total is None else self.total.clone()
        if self.total is None:
            self.total = before.clone()
        self.total += embeddings.sum(1, keepdim=True)
        return torch.cat([before, embeddings], dim=1)


class EchoForCausalLM(LlamaForCausalLM):
    """A Llama in which each token also sees the mean of all embeddings before it."""

    def forward(self, input_ids=None, cache=None, past_key_values=None, **kwargs):
        embeddings = self.model.embed_tokens(input_ids)
        cache = past_key_values if cache is None else cache
        if cache is None:
            sums = embeddings.cumsum(1)
        else:
            sums = cache.layers[0].add_echo(embeddings).cumsum(1)[:, -embeddings.shape[1] :]
        return super().forward(inputs_embeds=embeddings + 0.1 * sums, **kwargs, **{CACHE_ARGUMENT: cache})


def echo_model(kind):
    torch.manual_seed(0)
    model = EchoForCausalLM(LlamaConfig(**DECODER)).eval()
    model.config.layer_types = [kind, kind]
    return model


@pytest.fixture
def _taught():
    hpc.register_layer_kind("echo_attention", token_dims={"keys": -2, "values": -2, "echo": 1}, writes_in_place=False)
    hpc.register_layer_kind("total_attention")
    yield
    hpc.forget_layer_kind("echo_attention")
    hpc.forget_layer_kind("total_attention")


OPERATIONS = ("snapshot", "restore", "fork", "reorder", "crop", "forward")


@pytest.mark.usefixtures("_taught")
@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-offloaded"])
def test_a_kind_whose_entries_are_tokens_is_exact_and_croppable(strategy):
    report = hpc.check(
        echo_model("echo_attention"), strategies=[strategy], operations=OPERATIONS, scoring=False, thorough=False
    )
    assert {cell.operation: cell.outcome for cell in report.cells} == dict.fromkeys(OPERATIONS, "exact")


@pytest.mark.usefixtures("_taught")
def test_a_kind_that_is_written_in_place_is_exact_and_not_cropped():
    report = hpc.check(
        echo_model("total_attention"),
        strategies=["prefix-dynamic"],
        operations=OPERATIONS,
        scoring=False,
        thorough=False,
    )
    found = {cell.operation: cell.outcome for cell in report.cells}
    assert found == {**dict.fromkeys(OPERATIONS, "exact"), "crop": "refused"}


@pytest.mark.usefixtures("_taught")
def test_a_wrong_promise_is_found_by_the_check():
    hpc.register_layer_kind("total_attention", writes_in_place=False)
    report = hpc.check(
        echo_model("total_attention"),
        strategies=["prefix-dynamic"],
        operations=["snapshot"],
        scoring=False,
        thorough=False,
    )
    assert report.cell("prefix-dynamic", "snapshot").outcome == "wrong"


@pytest.mark.usefixtures("_taught")
def test_the_modeling_files_own_class_stays_registered():
    hpc.PrefixDynamicCache(config=echo_model("echo_attention").config)
    assert DYNAMIC_LAYER_TYPE_MAPPING["echo_attention"] is EchoLayer


@pytest.mark.usefixtures("_taught")
def test_what_cannot_be_captured_is_refused():
    model = echo_model("echo_attention")
    cache = hpc.PrefixDynamicCache(config=model.config)
    model(torch.tensor([[5, 6, 7]]), **{CACHE_ARGUMENT: cache})
    cache.layers[0].secret = object()
    with pytest.raises(hpc.UnsupportedLayerError, match="secret of EchoLayer holds a object"):
        cache.snapshot()


def test_a_kind_that_was_not_taught_is_refused():
    with pytest.raises(hpc.UnsupportedLayerError, match="of the kind 'echo_attention'"):
        hpc.PrefixDynamicCache(config=echo_model("echo_attention").config)


def test_own_kinds_cannot_be_replaced_or_forgotten():
    with pytest.raises(hpc.UnsupportedLayerError, match="known already"):
        hpc.register_layer_kind("full_attention")
    with pytest.raises(hpc.UnsupportedLayerError, match="was not registered"):
        hpc.forget_layer_kind("unheard_of")
