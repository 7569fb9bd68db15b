"""Several threads on one model, and calls that are interrupted."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import TextIteratorStreamer

import hf_prefix_cache as hpc
from generation.oracles import STRATEGIES, Checker, generated, tokens


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_threads_with_different_prompts_on_one_model_get_their_own_tokens(name, strategy, tiny_model):
    model, shared = tiny_model(name), tokens(1, 14)
    prompts = [torch.cat([shared, tokens(1, 3, seed=seed)], dim=1) for seed in range(4)]
    prompts += [tokens(1, 9, seed=seed) for seed in range(4, 8)]
    expected = [generated(model, prompt, max_new_tokens=12) for prompt in prompts]
    start = threading.Barrier(4)

    def run(index):
        if index < 4:
            start.wait()
        results = []
        for turn in range(2):
            options = {"cache_config": {"namespace": "ab"[index % 2]}} if turn else {}
            output = model.generate(
                prompts[index],
                do_sample=False,
                max_new_tokens=12,
                suppress_tokens=[0],
                cache_implementation=strategy,
                **options,
            )
            results.append(output)
        return results

    with ThreadPoolExecutor(4) as pool:
        for results, plain in zip(pool.map(run, range(8)), expected, strict=True):
            assert all(torch.equal(result, plain) for result in results)
    hpc.store_for(model).sanity_check()


def test_a_prefix_that_one_thread_gives_is_not_used_by_another(tiny_model):
    model, prompt = tiny_model("llama"), tokens(1, 16)
    wrapped = hpc.PrefixCachedModel(model, strategy="prefix-dynamic")
    snapshot = wrapped.prefill(prompt)
    hpc.store_for(model).clear()
    reports = []

    class Streams:
        """Runs another call in another thread while the first one is in `generate`."""

        def put(self, value):
            if not reports:
                other = threading.Thread(target=self.call_plainly)
                other.start()
                other.join()

        def end(self):
            pass

        def call_plainly(self):
            generated(model, prompt, cache_implementation="prefix-dynamic")
            reports.append(hpc.last_report(model))

    output = wrapped.generate(prompt, prefix=snapshot, streamer=Streams(), do_sample=False, max_new_tokens=5)
    assert reports[0].stored_tokens == 0
    assert torch.equal(output, generated(model, prompt, suppress_tokens=None))


class Raises:
    """A streamer that raises at a token."""

    def __init__(self, error, at):
        self.error, self.left = error, at

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise self.error

    def end(self):
        pass


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("full disk")])
def test_an_interrupted_call_leaves_the_store_sane_and_the_next_one_right(name, error, strategy, tiny_model):
    check, prompt = Checker(tiny_model(name), strategy), tokens(1, 14)
    for at in (0, 1, 3):
        with pytest.raises(type(error)):
            generated(check.model, prompt, cache_implementation=strategy, streamer=Raises(error, at))
        hpc.store_for(check.model).sanity_check()
    check(prompt)
    check(torch.cat([prompt, tokens(1, 5, seed=1)], dim=1), reused=14)
    assert hpc.generation.call.current_call() is None


def test_a_forward_that_fails_leaves_the_store_sane_and_the_next_call_right(tiny_model):
    model, prompt = tiny_model("llama"), torch.cat([tokens(1, 40).expand(3, -1), tokens(3, 4)], dim=1)
    for failing in (1, 2, 4):
        left = [failing]

        def fail(*_, left=left):
            left[0] -= 1
            if left[0] == 0:
                raise RuntimeError("out of memory")

        handle = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            generated(model, prompt, cache_implementation="prefix-dynamic")
        handle.remove()
    Checker(model, "prefix-dynamic")(prompt)


def test_errors_of_transformers_stay_its_own(tiny_model):
    model = tiny_model("llama")
    for options in ({"max_new_tokens": 0}, {"num_beams": 2, "num_return_sequences": 3}, {"nonsense": 1}):
        with pytest.raises(ValueError) as plain:  # noqa: PT011 - whatever Transformers says
            generated(model, tokens(1, 5), **options)
        with pytest.raises(type(plain.value)) as ours:
            generated(model, tokens(1, 5), cache_implementation="prefix-dynamic", **options)
        assert str(ours.value) == str(plain.value)


def test_a_streamer_in_another_thread_as_in_the_documentation_of_transformers(tiny_model):
    class Digits:
        def decode(self, ids, **_):
            return " ".join(str(int(token)) for token in ids) + " "

    model, prompt = tiny_model("llama"), tokens(1, 10)
    texts = []
    for options in ({}, {"cache_implementation": "prefix-dynamic"}, {"cache_implementation": "prefix-static"}):
        streamer = TextIteratorStreamer(Digits(), skip_prompt=True)
        worker = threading.Thread(target=generated, args=(model, prompt), kwargs={"streamer": streamer, **options})
        worker.start()
        texts.append("".join(streamer))
        worker.join()
    assert texts[0] == texts[1] == texts[2] != ""
