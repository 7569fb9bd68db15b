"""`hpc.check` passes on right models, and finds each of the faults that are planted here."""

import importlib.util
import inspect
import io
from dataclasses import replace

import pytest
import torch
from rich.console import Console

import hf_prefix_cache as hpc
from hf_prefix_cache.check import OPERATIONS
from hf_prefix_cache.compat import CACHE_ARGUMENT
from hf_prefix_cache.layers import AttentionState, PrefixDynamicLayer
from hf_prefix_cache.scoring.masks import TreeLayout
from recurrent_models import RECURRENT_MODELS
from tiny_models import TINY_MODELS

STRATEGIES = ("prefix-dynamic", "prefix-static", "prefix-offloaded")
if importlib.util.find_spec("bitsandbytes"):
    STRATEGIES += ("prefix-quantized",)


def outcomes(report, strategy):
    return {cell.operation: cell.outcome for cell in report.cells if cell.strategy == strategy}


def quick(model, *, strategies=("prefix-dynamic",), **options):
    return hpc.check(model, strategies=strategies, thorough=False, **options)


# -- right models -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_every_strategy_is_exact_on_attention(name):
    report = quick(TINY_MODELS[name](), strategies=STRATEGIES)
    assert report.passed
    for strategy in STRATEGIES:
        refused = {key for key, outcome in outcomes(report, strategy).items() if outcome != "exact"}
        assert refused <= ({"padding", "crop"} if name == "gemma3_text" else set())
    assert report.cell("scoring (packed)", "scores").outcome == "exact"


def test_a_running_state_is_exact_and_what_it_cannot_do_is_refused_by_name():
    report = quick(RECURRENT_MODELS["lfm2"]())
    assert report.passed
    assert report.cell("prefix-dynamic", "fork").outcome == "exact"
    crop = report.cell("prefix-dynamic", "crop")
    assert crop.outcome == "refused"
    assert crop.error.startswith("NotCroppableError: the cache cannot be cropped")


def test_split_points_lie_before_at_and_beyond_a_window():
    report = hpc.check(TINY_MODELS["mistral"](), strategies=["prefix-dynamic"], operations=["snapshot"], scoring=False)
    assert {7, 8, 13} <= set(report.splits)
    assert report.passed


def test_thresholds_that_no_text_comes_to_are_named():
    report = quick(TINY_MODELS["mistral"](), operations=["snapshot"], scoring=False, max_tokens=6)
    assert report.not_reached == (8,)
    assert max(report.splits) == 6


def test_the_users_own_text_is_cut():
    model = TINY_MODELS["llama"]()
    assert quick(model, operations=["crop"], scoring=False, input_ids=range(5, 25)).splits == (7, 20)


def test_mode_store_and_weights_are_as_before():
    model = TINY_MODELS["llama"]().train()
    store = hpc.store_for(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert quick(model).passed
    assert model.training
    assert hpc.store_for(model) is store
    assert len(store) == 0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_result_shows_as_a_table_and_as_json_types():
    report = quick(TINY_MODELS["mistral"](), strategies=STRATEGIES)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report)
    text = console.export_text()
    # Nothing is cut off in an ordinary terminal.
    for strategy in STRATEGIES:
        assert strategy.removeprefix("prefix-") in text
    for operation in {cell.operation for cell in report.cells}:
        assert f" {operation} " in text
    assert "*: where it is not refused." in text
    as_dict = report.to_dict()
    assert as_dict["passed"] is True
    assert {cell["operation"] for cell in as_dict["cells"]} == {cell.operation for cell in report.cells}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"strategies": ["prefix-auto"]}, hpc.UnknownStrategyError),
        ({"max_tokens": 1}, hpc.CacheCapacityError),
        ({"input_ids": [5, 6, 99]}, hpc.InvalidTokensError),
    ],
)
def test_bad_arguments_are_refused(options, error):
    with pytest.raises(error):
        hpc.check(TINY_MODELS["llama"](), **options)


# -- planted faults ---------------------------------------------------------------------------------------------------


def held_by(cache):
    return 0 if cache is None else int(cache.get_seq_length())


def wrapped_forward(model, change):
    """Let ``change`` alter what the model is called with on a cache that holds tokens."""
    forward = model.forward

    def altered(*args, **kwargs):
        cache = kwargs.get(CACHE_ARGUMENT)
        if held_by(cache):
            kwargs = change(kwargs, held_by(cache))
        return forward(*args, **kwargs)

    # Signatures decide what is passed: keep the model's own.
    altered.__signature__ = inspect.signature(forward)
    model.forward = altered
    return model


def test_a_mask_that_ignores_the_prefix_is_found():
    def hide(kwargs, held):
        rows, new = kwargs["input_ids"].shape
        hidden = torch.cat([torch.zeros(rows, held), torch.ones(rows, new)], dim=1).long()
        return {**kwargs, "attention_mask": hidden}

    report = quick(wrapped_forward(TINY_MODELS["llama"](), hide))
    assert not report.passed
    found = outcomes(report, "prefix-dynamic")
    assert {found[name] for name in ("snapshot", "restore", "fork", "crop", "generate")} == {"wrong"}


def test_positions_that_are_off_by_one_are_found():
    def shift(kwargs, held):
        rows, new = kwargs["input_ids"].shape
        return {**kwargs, "position_ids": torch.arange(held + 1, held + 1 + new).expand(rows, -1)}

    report = quick(wrapped_forward(TINY_MODELS["qwen3"](), shift))
    assert outcomes(report, "prefix-dynamic")["snapshot"] == "wrong"


def test_a_layer_that_drops_a_token_of_a_snapshot_is_found(monkeypatch):
    load = PrefixDynamicLayer.load

    def careless(self, state, rows):
        if isinstance(state, AttentionState) and state.length:
            first, *rest = state.segments
            blank = [torch.cat([torch.zeros_like(part[..., :1, :]), part[..., 1:, :]], dim=-2) for part in first]
            state = replace(state, segments=(type(first)(*blank), *rest))
        load(self, state, rows)

    monkeypatch.setattr(PrefixDynamicLayer, "load", careless)
    found = outcomes(quick(TINY_MODELS["llama"]()), "prefix-dynamic")
    assert found["snapshot"] == found["restore"] == found["fork"] == "wrong"
    assert found["crop"] == "exact"


def test_forks_that_see_each_others_tokens_are_found(monkeypatch):
    fork, known = hpc.PrefixDynamicCache.fork, {}

    def shared(self, batch_size=None):
        key = (id(self), batch_size)
        if key not in known:
            known[key] = fork(self, batch_size)
        return known[key]

    monkeypatch.setattr(hpc.PrefixDynamicCache, "fork", shared)
    found = outcomes(quick(TINY_MODELS["llama"](), operations=["snapshot", "fork"]), "prefix-dynamic")
    assert found == {"snapshot": "exact", "fork": "wrong"}


def test_a_scoring_route_that_leaks_between_branches_is_found(monkeypatch):
    def leaking(*args, **kwargs):
        layout = TreeLayout(*args, **kwargs)
        return replace(layout, key_ends=torch.full_like(layout.key_ends, 10**6), blocks=())

    monkeypatch.setattr("hf_prefix_cache.scoring.packed.TreeLayout", leaking)
    report = quick(TINY_MODELS["llama"](), operations=["snapshot"])
    assert outcomes(report, "prefix-dynamic") == {"snapshot": "exact"}
    assert report.problems == (report.cell("scoring (packed)", "scores"),)


def test_a_crop_that_says_yes_and_keeps_too_much_is_found(monkeypatch):
    monkeypatch.setattr(PrefixDynamicLayer, "crop_to", lambda self, length: None)
    assert outcomes(quick(TINY_MODELS["llama"]()), "prefix-dynamic")["crop"] == "wrong"


def test_an_untyped_error_is_a_failure(monkeypatch):
    def broken(self, snapshot):
        raise RuntimeError("out of order")

    monkeypatch.setattr(hpc.PrefixDynamicCache, "restore", broken)
    cell = quick(TINY_MODELS["llama"](), operations=["restore"], scoring=False).cell("prefix-dynamic", "restore")
    assert (cell.outcome, cell.error) == ("failed", "RuntimeError: out of order")


# -- the real model ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_strategy_passes_on_the_real_model(packaged_model):
    report = hpc.check(packaged_model[0])
    assert report.passed
    assert all(cell.outcome == "exact" for cell in report.cells)


def test_the_operations_have_names():
    assert list(OPERATIONS) == ["snapshot", "restore", "fork", "reorder", "crop", "padding", "forward", "generate"]
