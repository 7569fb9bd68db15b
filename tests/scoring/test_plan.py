import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_prefix_cache.exceptions import MissingPackageError, RequestError
from hf_prefix_cache.scoring import plan
from scoring.models import PACKED

few_tokens = st.lists(st.integers(0, 2), max_size=7)
request_lists = st.lists(st.tuples(few_tokens.filter(bool), few_tokens), max_size=12)
PREAMBLE, PASSAGE = list(range(100, 140)), list(range(200, 220))
LEVELS = [
    ([*PREAMBLE, *PASSAGE, 1], [2, 3]),
    ([*PREAMBLE, *PASSAGE, 1], [4, 5]),
    ([*PREAMBLE, *PASSAGE, 6], [7, 8]),
    ([*PREAMBLE, 9], [10, 11]),
]


@settings(max_examples=80, deadline=None, derandomize=True, database=None)
@given(request_lists)
def test_totals_agree_with_counting_one_by_one(requests: list) -> None:
    rows = [tuple([*context, *rest][:-1]) for context, rest in requests if rest]
    sharing = plan(requests)
    assert sharing.total_tokens == sum(map(len, rows))
    assert sharing.grouped_tokens == sum(map(len, set(rows)))
    assert sharing.unique_tokens == len({row[:end] for row in rows for end in range(1, len(row) + 1)})
    assert sharing.unique_tokens + sum(node.saved_tokens for node in sharing.nodes) == sharing.grouped_tokens
    for node in sharing.nodes:
        context, rest = requests[node.example]
        prefix = tuple([*context, *rest][: node.end])
        assert sum(row[: node.end] == prefix for row in rows) == node.requests
        assert sum(row[: node.end] == prefix for row in set(rows)) == node.rows > 1
        if node.parent >= 0:
            assert sharing.nodes[node.parent].end == node.start
            assert sharing.nodes[node.parent].level == node.level - 1
        else:
            assert node.start == 0
    assert str(sharing)
    assert sharing.draw()


def test_levels_count_the_stretches_on_the_longest_way() -> None:
    sharing = plan(LEVELS)
    assert sharing.levels == 4
    assert sharing.heaviest_prefixes[0].end == 40
    assert sharing.heaviest_prefixes[0].saved_tokens == 120
    assert sharing.ideal_speedup_plain == sharing.total_tokens / sharing.unique_tokens
    assert plan([([1, 2], [3])]).levels == 1
    assert plan([]).levels == 0
    assert plan([]).ideal_speedup == 1.0


def test_one_token_continuations_are_grouped_as_the_harness_does() -> None:
    sharing = plan([([1, 2, 3], [token]) for token in (4, 5, 6)])
    assert (sharing.total_tokens, sharing.grouped_tokens, sharing.unique_tokens) == (9, 3, 3)
    assert sharing.ideal_speedup == 1.0
    assert sharing.ideal_speedup_plain == 3.0


def test_an_empty_context_counts_the_prefix_token() -> None:
    assert plan([([], [5, 6])]).total_tokens == 2
    assert plan([([], [5, 6]), ([9], [5, 7])], prefix_token_id=9).unique_tokens == 2
    with pytest.raises(RequestError, match="request 0"):
        plan([[1, 2, 3]])


def test_the_drawing_shows_the_heaviest_and_counts_the_rest() -> None:
    drawing = plan(LEVELS).draw()
    assert "40 tokens × 4 requests" in drawing
    assert "20 tokens × 3 requests" in drawing
    assert "1 request on its own" in drawing
    assert all(len(line) <= 30 for line in plan(LEVELS).draw(width=30).splitlines())
    assert "2 smaller stretches" not in drawing
    assert "1 smaller stretch" in plan(LEVELS).draw(max_nodes=1)


def test_the_picture_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name, requests in (("levels", LEVELS), ("alone", [([1], [2])]), ("none", [])):
        path = tmp_path / f"{name}.png"
        plan(requests).save_png(path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_picture_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match="pip install matplotlib"):
        plan(LEVELS).save_png("never.png")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text"])
def test_predicted_bytes_are_those_of_the_longest_row_and_a_chunk(name: str) -> None:
    from transformers import DynamicCache

    from hf_prefix_cache.compat import cache_argument

    model = PACKED[name]()
    sharing = plan([([5] * 20, [6, 7])])
    cache = DynamicCache()
    with torch.no_grad():
        model(torch.tensor([[5] * 21]), use_cache=True, **cache_argument(cache))
    held = sum(2 * layer.keys.nbytes for layer in cache.layers)
    assert sharing.longest_row == 21
    assert sharing.kv_bytes(model, chunk_tokens=0) == held
    assert sharing.kv_bytes(model.config, torch.float32, chunk_tokens=0) == held
    assert sharing.kv_bytes(model, torch.bfloat16, chunk_tokens=0) == held / 2
    assert sharing.kv_bytes(model) == 2 * held
