"""Every architecture is exact or refused by name, and none gets worse than docs/coverage.json says."""

import copy
import warnings

import pytest

import hf_prefix_cache as hpc
from hf_prefix_cache.architectures import why_no_cache

from .build import ARCHITECTURES, build_architecture
from .coverage import measure, release
from .markdown import STRATEGIES, markdown, standing
from .record import RECORD, newest, read_record, worse_cells

# By layer kind first, then by what else is peculiar: positions, sinks, soft caps, experts, shared keys, no cache.
REPRESENTATIVE = (
    *("llama", "gpt2", "bloom", "falcon", "mpt", "opt", "gptj", "phi3", "qwen3_moe", "deepseek_v3", "moshi"),
    *("mistral", "gemma3_text", "gpt_oss", "cohere2", "gpt_neo", "llama4_text", "gemma3n_text", "dory"),
    *("deepseek_v32", "minimax_m3_vl_text", "deepseek_v4", "nemotron_h"),
    *("mamba", "mamba2", "falcon_h1", "lfm2", "qwen3_next", "olmo_hybrid", "rwkv"),
)


def recorded(name):
    record = read_record().get(release(), {})
    if name not in record:
        pytest.skip(f"nothing is recorded for {name} on Transformers {release()}; run make coverage-table")
    return record[name]


def check_against_record(name, *strategies):
    before = recorded(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert worse_cells(before, measure(name, strategies)) == []


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_no_cell_got_worse(name):
    if name not in ARCHITECTURES:
        pytest.skip(f"Transformers {release()} has no {name}")
    check_against_record(name, "prefix-dynamic")


@pytest.mark.zoo
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_no_cell_of_any_architecture_got_worse(name):
    check_against_record(name, *STRATEGIES)


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
    rows = read_record()[newest(read_record())[0]]
    built = [row for row in rows.values() if "cells" in row]
    assert len(built) >= 170
    caching = [row for row in built if not row["no_cache"]]
    exact = sum(standing(row, "prefix-dynamic") == "exact" for row in caching)
    assert exact / len(caching) >= 0.98


def test_a_worse_cell_is_seen():
    before = {"cells": {"prefix-dynamic": {"fork": {"outcome": "exact"}, "crop": {"outcome": "refused"}}}}
    assert worse_cells(before, copy.deepcopy(before)) == []
    now = copy.deepcopy(before)
    now["cells"]["prefix-dynamic"]["fork"]["outcome"] = "refused"
    now["cells"]["prefix-dynamic"]["crop"]["outcome"] = "wrong"
    assert len(worse_cells(before, now)) == 2
    assert worse_cells(before, {"not_built": "why"}) == ["it is not built any more"]


def test_the_written_table_is_that_of_the_record():
    assert RECORD.with_suffix(".md").read_text(encoding="utf-8") == markdown(read_record())


def test_models_without_a_cache_of_transformers_are_refused_by_name():
    model = build_architecture("rwkv")
    assert "keeps its state outside of Transformers' Cache" in why_no_cache(model.config)
    with pytest.raises(hpc.UnsupportedModelError, match="keeps its state outside"):
        hpc.PrefixDynamicCache(config=model.config)
