"""What the last call asked for, reused and computed."""

import gc
import weakref

import pytest

import hf_prefix_cache as hpc
from generation.oracles import counted, generated, tokens


def test_before_the_first_call_there_is_none(tiny_model):
    model = tiny_model("llama")
    assert hpc.last_report(model) is None
    assert hpc.PrefixCachedModel(model).report() is None


def test_each_model_has_its_own(tiny_model):
    one, other = tiny_model("llama"), tiny_model("llama")
    generated(one, tokens(1, 7), cache_implementation="prefix-dynamic")
    generated(other, tokens(2, 5), cache_implementation="prefix-static")
    assert (hpc.last_report(one).rows, hpc.last_report(one).prompt_tokens) == (1, 7)
    assert (hpc.last_report(other).rows, hpc.last_report(other).prompt_tokens) == (2, 10)


def test_a_report_is_a_value_that_later_calls_do_not_change(tiny_model):
    model = tiny_model("llama")
    generated(model, tokens(1, 7), cache_implementation="prefix-dynamic")
    report = hpc.last_report(model)
    generated(model, tokens(1, 7), cache_implementation="prefix-dynamic")
    assert report.reused_tokens == 0
    assert hpc.last_report(model).reused_tokens == 6
    with pytest.raises(AttributeError):
        report.rows = 3


def test_computed_tokens_are_those_that_the_model_was_fed(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 30)
    for ids in (prompt[:, :20], prompt, prompt.repeat(4, 1)):
        with counted(model) as count:
            generated(model, ids, max_new_tokens=1, cache_implementation="prefix-dynamic")
        assert hpc.last_report(model).computed_tokens == count.tokens
    assert hpc.last_report(model).computed_tokens == 4


def test_a_report_does_not_keep_its_model_alive(tiny_model):
    model = tiny_model("llama")
    generated(model, tokens(1, 7), cache_implementation="prefix-dynamic")
    model_is_there = weakref.ref(model)
    del model
    gc.collect()
    assert model_is_there() is None
