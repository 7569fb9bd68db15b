"""Every architecture is exact or refused by name, and none gets worse than docs/coverage.json says."""

import copy
import warnings
from functools import partial

import pytest
import torch

import hf_prefix_cache as hpc
from generation.oracles import generated
from hf_prefix_cache.architectures import why_no_cache
from hf_prefix_cache.layers import PrefixDynamicLayer

from .build import ARCHITECTURES, build_architecture
from .coverage import measure, release
from .markdown import STRATEGIES, markdown, standing
from .record import RECORD, read_record, recorded_rows, worse_cells

# By layer kind first, then by what else is peculiar: positions, sinks, soft caps, experts, shared keys, no cache.
REPRESENTATIVE = (
    *("llama", "gpt2", "bloom", "falcon", "mpt", "opt", "gptj", "phi3", "qwen3_moe", "deepseek_v3", "moshi"),
    *("mistral", "gemma3_text", "gpt_oss", "cohere2", "gpt_neo", "llama4_text", "gemma3n_text", "dory"),
    *("deepseek_v32", "minimax_m3_vl_text", "deepseek_v4", "nemotron_h"),
    *("mamba", "mamba2", "falcon_h1", "lfm2", "qwen3_next", "olmo_hybrid", "rwkv"),
)


def check_against_record(name):
    before = recorded_rows(read_record(), release()).get(name, {})  # what is new may not be wrong
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        worse = worse_cells(before, measure(name))
    assert not worse, "\n".join(worse)


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_no_cell_got_worse(name):
    if name not in ARCHITECTURES:
        pytest.skip(f"Transformers {release()} has no {name}")
    check_against_record(name)


@pytest.mark.zoo
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_cell_of_any_architecture_got_worse(name):
    check_against_record(name)


def test_the_record_has_no_wrong_cell_and_enough_architectures():
    for name, rows in read_record().items():
        cells = [
            (name, key, strategy, operation, cell)
            for key, row in rows.items()
            for strategy, operations in row.get("cells", {}).items()
            for operation, cell in operations.items()
        ]
        assert [entry for entry in cells if entry[-1]["outcome"] not in ("exact", "refused")] == []
        assert all(cell[-1].get("error") for cell in cells if cell[-1]["outcome"] == "refused")
        built = [row for row in rows.values() if "cells" in row]
        assert len(built) >= 170
        assert all(strategy in row["cells"] for row in built for strategy in STRATEGIES)
        caching = [row for row in built if not row["no_cache"]]
        exact = sum(standing(row, "prefix-dynamic") == "exact" for row in caching)
        assert exact / len(caching) >= 0.98
    # Each is there, or its reason.
    assert set(recorded_rows(read_record(), release())) >= set(ARCHITECTURES) or release() not in read_record()


def test_a_worse_cell_is_seen():
    before = {"cells": {"prefix-dynamic": {"fork": {"outcome": "exact"}, "crop": {"outcome": "refused"}}}}
    assert worse_cells(before, copy.deepcopy(before)) == []
    now = copy.deepcopy(before)
    now["cells"]["prefix-dynamic"]["fork"]["outcome"] = "refused"
    now["cells"]["prefix-dynamic"]["crop"]["outcome"] = "wrong"
    assert len(worse_cells(before, now)) == 2
    assert worse_cells(before, {"not_built": "why"}) == ["it is not built any more"]


def test_a_cell_that_a_change_makes_worse_fails(monkeypatch):
    def refuse(self, batch_size=None):
        raise hpc.UnsupportedModelError("no forks")

    monkeypatch.setattr(hpc.PrefixDynamicCache, "fork", refuse)
    monkeypatch.setattr(PrefixDynamicLayer, "crop_to", lambda self, length: None)
    with pytest.raises(AssertionError) as failure:
        check_against_record("llama")
    assert "prefix-dynamic fork: exact before, now {'outcome': 'refused'" in str(failure.value)
    assert "prefix-dynamic crop: exact before, now {'outcome': 'wrong'" in str(failure.value)


def test_releases_between_are_compared_with_the_one_before():
    record = {"5.20": {"llama": 1}, "5.24": {"llama": 2}}
    found = [recorded_rows(record, name)["llama"] for name in ("5.20", "5.22", "5.24", "5.30", "5.9")]
    assert found == [1, 1, 2, 2, 1]


def test_the_written_table_is_that_of_the_record():
    assert RECORD.with_suffix(".md").read_text(encoding="utf-8") == markdown(read_record())


def test_models_without_a_cache_of_transformers_are_refused_by_name():
    model = build_architecture("rwkv")
    assert "keeps its state outside of Transformers' Cache" in why_no_cache(model.config)
    with pytest.raises(hpc.UnsupportedModelError, match="keeps its state outside"):
        hpc.PrefixDynamicCache(config=model.config)


@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_models_whose_decoding_steps_differ_from_their_prefill_are_refused_at_every_door(name):
    model = build_architecture(name)
    doors = {
        "dynamic": lambda: hpc.PrefixDynamicCache(config=model.config),
        "static": lambda: hpc.PrefixStaticCache(config=model.config, max_cache_len=16),
        "offloaded": lambda: hpc.PrefixOffloadedCache(config=model.config),
        "prefill": lambda: hpc.PrefixCachedModel(model).prefill([5, 6, 7]),
        "strategy": lambda: hpc.choose_strategy(model),
    }
    for strategy in ("prefix-dynamic", "prefix-static", "prefix-offloaded", "prefix-auto"):
        doors[strategy] = partial(generated, model, torch.tensor([[5, 6, 7]]), cache_implementation=strategy)
    for door in doors.values():
        with pytest.raises(hpc.UnsupportedModelError, match=r"time_step_min is 0.001, and its decoding step leaves"):
            door()
    hpc.loglikelihood(model, [([5, 6, 7], [8, 9])], progress=False)
    assert hpc.last_scoring_report(model).route == "rows"
