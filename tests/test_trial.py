"""``prefix-auto`` tries a model class that Transformers does not ship, by the code of `hpc.check`."""

import inspect

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_prefix_cache as hpc
from generation.oracles import counted, generated, tokens
from hf_prefix_cache.compat import CACHE_ARGUMENT
from tiny_models import TINY_MODELS

AUTO = {"cache_implementation": "prefix-auto"}


class Right(LlamaForCausalLM):
    """A class as users write it."""


class CountsFromZero(LlamaForCausalLM):
    """Forgets that tokens behind a prefix have later positions."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        cache = kwargs.get(CACHE_ARGUMENT)
        if cache is not None and cache.get_seq_length():
            position_ids = torch.arange(input_ids.shape[1])[None]
        return super().forward(input_ids=input_ids, position_ids=position_ids, **kwargs)


class Fails(LlamaForCausalLM):
    """Takes no second call."""

    def forward(self, input_ids=None, **kwargs):
        cache = kwargs.get(CACHE_ARGUMENT)
        if cache is not None and cache.get_seq_length() > 1:
            raise IndexError("one token at most")
        return super().forward(input_ids=input_ids, **kwargs)


# Signatures decide by which name a cache is passed.
CountsFromZero.forward.__signature__ = Fails.forward.__signature__ = inspect.signature(LlamaForCausalLM.forward)


def own(model_class):
    torch.manual_seed(0)
    return model_class(TINY_MODELS["llama"]().config).eval()


def test_a_class_that_is_right_is_tried_once_and_served():
    model, prompt = own(Right), tokens(1, 12)
    expected = generated(model, prompt)
    for calls in (True, False):
        with counted(model) as fed:
            assert torch.equal(generated(model, prompt, **AUTO), expected)
        assert (fed.tokens > 100) is calls


def test_what_transformers_ships_costs_nothing():
    model, prompt = TINY_MODELS["llama"](), tokens(1, 12)
    with counted(model) as fed:
        generated(model, prompt, **AUTO)
    with counted(model) as usual:
        generated(model, prompt, cache_implementation="prefix-dynamic", cache_config={"reuse": False})
    assert fed.tokens == usual.tokens


@pytest.mark.parametrize(
    ("model_class", "problem"), [(CountsFromZero, "off by"), (Fails, "IndexError: one token at most")]
)
def test_a_class_that_is_wrong_behind_a_prefix_is_refused(model_class, problem):
    model = own(model_class)
    for _ in range(2):
        with pytest.raises(hpc.UnsupportedModelError, match=f"{model_class.__name__} .*{problem}.*hpc.check"):
            generated(model, tokens(1, 12), **AUTO)


def test_forwards_of_the_wrapper_try_it_too():
    wrapper = hpc.PrefixCachedModel(own(CountsFromZero))
    prefix = wrapper.prefill(list(range(5, 15)))
    with pytest.raises(hpc.UnsupportedModelError, match="was tried out"):
        wrapper.forward(torch.tensor([[3, 4]]), prefix=prefix)
