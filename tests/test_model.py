"""`PrefixCachedModel`: prefill, generate and forward, against plain Transformers row by row."""

import warnings

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig

import hf_prefix_cache as hpc
from generation.oracles import COMBINATIONS, FULL_ATTENTION, counted, generated, pad_left, tokens
from generation.words import word_tokenizer
from hf_prefix_cache.compat import cache_argument, output_cache
from tiny_models import DECODER, TINY_MODELS, build

GREEDY = {"do_sample": False, "max_new_tokens": 5, "suppress_tokens": [0]}


@pytest.fixture(params=[f"{name}-{strategy}" for name, strategy in COMBINATIONS])
def wrapped(request, tiny_model):
    name, strategy = request.param.split("-", 1)
    return hpc.PrefixCachedModel(tiny_model(name), word_tokenizer(), strategy=strategy)


@pytest.fixture
def llama(tiny_model):
    return hpc.PrefixCachedModel(tiny_model("llama"), word_tokenizer(), strategy="prefix-dynamic")


def logits_of(model, row):
    with torch.no_grad():
        return model(row[None]).logits[0]


# -- prefill ---------------------------------------------------------------------------------------------------------


def test_a_prefix_is_complete_and_is_computed_once(wrapped):
    ids = tokens(1, 20)
    for computed in (20, 0):
        with counted(wrapped.model) as count:
            prefix = wrapped.prefill(ids)
        assert count.tokens == computed
        assert torch.equal(prefix.input_ids, ids)
        assert (prefix.seq_length, prefix.batch_size) == (20, 1)
        prefix.verify(wrapped.model)
        torch.testing.assert_close(prefix.next_logits[0], logits_of(wrapped.model, ids[0])[-1], atol=1e-4, rtol=0)


def test_a_longer_prefix_computes_what_is_new_and_a_known_end_only_its_last_token(wrapped):
    ids = tokens(1, 20)
    wrapped.prefill(ids[:, :12])
    with counted(wrapped.model) as count:
        wrapped.prefill(ids)
    assert count.tokens == 8
    # The end of an answer is known without the logits behind it.
    answer = wrapped.generate(ids, **GREEDY)[:, :-1]
    with counted(wrapped.model) as count:
        prefix = wrapped.prefill(answer)
    assert count.tokens <= 1 + (answer.shape[1] - 20)
    torch.testing.assert_close(prefix.next_logits[0], logits_of(wrapped.model, answer[0])[-1], atol=1e-4, rtol=0)


def test_a_prefix_longer_than_a_chunk_is_fed_in_chunks(llama, monkeypatch):
    monkeypatch.setattr("hf_prefix_cache.forward._CHUNK", 8)
    monkeypatch.setattr("hf_prefix_cache.forward._FEWEST_COLUMNS", 1)
    with counted(llama.model) as count:
        prefix = llama.prefill(tokens(1, 20))
    assert count.calls == [8, 8, 4]
    torch.testing.assert_close(prefix.next_logits[0], logits_of(llama.model, tokens(1, 20)[0])[-1], atol=1e-4, rtol=0)


def test_text_and_messages_are_prefixes_of_the_prompts_that_begin_with_them(llama):
    chat = [{"role": "system", "content": "you are a helpful bot"}, {"role": "user", "content": "what is one ?"}]
    system = llama.prefill(chat[:1])
    with counted(llama.model) as count:
        output = llama.generate(chat, prefix=system, **GREEDY)
    prompt = llama.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    assert torch.equal(output, generated(llama.model, prompt["input_ids"]))
    assert count.calls[0] == prompt["input_ids"].shape[1] - system.seq_length
    text = llama.prefill("hello helpful bot")
    output = llama.generate("hello helpful bot what is two", prefix=text, **GREEDY)
    assert torch.equal(
        output,
        generated(llama.model, llama.tokenizer("hello helpful bot what is two", return_tensors="pt")["input_ids"]),
    )
    assert llama.report().stored_tokens == text.seq_length


def test_template_options_go_to_the_template(llama):
    tools = [{"type": "function", "function": {"name": "w1", "parameters": {}}}]
    chat = [{"role": "system", "content": "you are a bot"}, {"role": "user", "content": "hello"}]
    prefix = llama.prefill(chat[:1], tools=tools)
    llama.generate(chat, prefix=prefix, template_options={"tools": tools}, **GREEDY)
    assert llama.report().stored_tokens == prefix.seq_length
    with pytest.warns(UserWarning, match="prompt 0 leaves the prefix at token 2"):
        llama.generate(chat, prefix=prefix, **GREEDY)


def test_a_prefix_in_training_mode_with_dropout_is_refused():
    model = build(LlamaConfig(**DECODER, attention_dropout=0.2))
    wrapped = hpc.PrefixCachedModel(model)
    wrapped.prefill(tokens(1, 5))
    model.train()
    with pytest.raises(hpc.UnsupportedModelError, match=r"training mode with dropout.*call eval\(\) first"):
        wrapped.prefill(tokens(1, 5))


@pytest.mark.parametrize(
    ("prefix", "error", "message"),
    [
        (tokens(2, 5), hpc.InputMismatchError, "prefix has 2 rows; a prefix is one row"),
        ([], hpc.InvalidTokensError, "prefix has shape"),
        ([5, 200], hpc.InvalidTokensError, "prefix holds the id 200"),
        ([1.5], hpc.InvalidTokensError, "integers"),
    ],
)
def test_what_is_no_prefix_is_refused_and_the_store_unharmed(prefix, error, message, llama):
    with pytest.raises(error, match=message):
        llama.prefill(prefix)
    assert len(hpc.store_for(llama.model)) == 0


# -- generate --------------------------------------------------------------------------------------------------------


def test_generate_returns_what_the_model_returns_for_one_prompt_and_for_ragged_ones(wrapped):
    prefix_ids = tokens(15)
    rows = [torch.cat([prefix_ids, tokens(count, seed=count)]) for count in (4, 1, 6)]
    prefix = wrapped.prefill(prefix_ids)
    hpc.store_for(wrapped.model).clear()  # only the prefix that is passed can be reused
    output = wrapped.generate(rows[0], prefix=prefix, **GREEDY)
    assert torch.equal(output, generated(wrapped.model, rows[0][None]))
    assert wrapped.report().reused_tokens == 15
    ids, mask = pad_left(*rows)
    expected = generated(wrapped.model, ids, attention_mask=mask)
    assert torch.equal(wrapped.generate([row.tolist() for row in rows], prefix=prefix, **GREEDY), expected)
    assert torch.equal(wrapped.generate(ids, attention_mask=mask, prefix=prefix, **GREEDY), expected)
    assert torch.equal(wrapped.generate(ids, prefix=prefix, **GREEDY), expected)  # the mask is inferred
    assert torch.equal(wrapped.generate(rows, **GREEDY), expected)


def test_a_cache_as_prefix_is_forked_and_not_changed(wrapped):
    ids, model = tokens(1, 15), wrapped.model
    prompt = torch.cat([ids, tokens(1, 4, seed=1)], dim=1)
    cache = wrapped.prefill(ids).to_cache()
    hpc.store_for(model).clear()
    before = [tensor.clone() for tensor in cache.snapshot().tensors]
    output = wrapped.generate(prompt, prefix=cache, **GREEDY)
    assert torch.equal(output, generated(model, prompt))
    assert wrapped.report().stored_tokens == 15
    assert cache.seq_length == 15
    assert all(torch.equal(one, other) for one, other in zip(before, cache.snapshot().tensors, strict=True))
    # A cache that has grown by tokens that it was not told knows the first ones only.
    with torch.no_grad():
        model(tokens(1, 1, seed=9), **cache_argument(cache))
    hpc.store_for(model).clear()
    assert torch.equal(wrapped.generate(prompt, prefix=cache, **GREEDY), generated(model, prompt))
    assert wrapped.report().stored_tokens == 15


def test_where_prompts_leave_the_prefix_a_warning_says_so_and_the_rest_is_computed(wrapped):
    ids = tokens(1, 15)
    prefix = wrapped.prefill(ids)
    hpc.store_for(wrapped.model).clear()
    diverging = torch.cat([ids[:, :11], tokens(1, 6, seed=1)], dim=1)
    with pytest.warns(UserWarning, match="prompt 0 leaves the prefix at token 11 of 15"):
        output = wrapped.generate(diverging, prefix=prefix, **GREEDY)
    assert torch.equal(output, generated(wrapped.model, diverging))
    slices = all(layer.is_sliceable for layer in prefix.layers)
    assert wrapped.report().reused_tokens == (11 if slices else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wrapped.generate(ids[:, :9], prefix=prefix, **GREEDY)  # shorter than the prefix, but not against it


def test_a_generation_config_is_respected_and_not_changed(llama):
    prompt, config = tokens(1, 10), GenerationConfig(max_new_tokens=4, do_sample=False)
    for _ in range(2):
        output = llama.generate(prompt, generation_config=config)
        assert torch.equal(output, llama.model.generate(prompt, generation_config=config))
    assert config.cache_implementation is None
    assert llama.report().strategy == "prefix-dynamic"
    config.cache_implementation = "prefix-static"
    llama.generate(prompt, generation_config=config)
    assert llama.report().strategy == "prefix-static"


def test_auto_chooses_and_a_call_may_choose_otherwise(tiny_model):
    wrapped = hpc.PrefixCachedModel(tiny_model("llama"))
    wrapped.generate(tokens(1, 6), **GREEDY)
    assert wrapped.report().strategy == "prefix-dynamic"  # on the CPU
    wrapped.generate(tokens(1, 6), cache_implementation="prefix-static", **GREEDY)
    assert wrapped.report().strategy == "prefix-static"
    assert wrapped.report().reused_tokens == 5


def test_prefixes_of_other_models_or_weights_are_refused(tiny_model, llama):
    prompt = tokens(1, 12)
    foreign = hpc.PrefixCachedModel(build(llama.model.config, seed=5)).prefill(prompt)
    own = llama.prefill(prompt)
    for call in (llama.generate, llama.forward):
        with pytest.raises(hpc.FingerprintMismatchError, match="prefill it again"):
            call(prompt, prefix=foreign)
    with torch.no_grad():
        llama.model.lm_head.weight.add_(0.1)
    for call in (llama.generate, llama.forward):
        with pytest.raises(hpc.FingerprintMismatchError):
            call(prompt, prefix=own)
    assert torch.equal(llama.generate(prompt, **GREEDY), generated(llama.model, prompt))


def test_prefixes_whose_tokens_are_not_known_or_that_are_several_are_refused(llama):
    model, prompt = llama.model, tokens(2, 12)
    cache = hpc.PrefixDynamicCache(config=model.config)
    with torch.no_grad():
        model(prompt, **cache_argument(cache))
    one = cache.fork()
    one.batch_select_indices(torch.tensor([0]))
    with pytest.raises(hpc.SnapshotIncompleteError, match="does not know its token ids"):
        llama.generate(prompt[:1], prefix=one)
    with pytest.raises(hpc.SnapshotIncompleteError, match="does not know its token ids"):
        llama.generate(prompt[:1], prefix=one.snapshot(model=model))
    with pytest.raises(hpc.SnapshotIncompleteError, match="does not know its model"):
        llama.generate(prompt[:1], prefix=one.snapshot(input_ids=prompt[:1]))
    for prefix in (cache, cache.snapshot(model=model, input_ids=prompt)):
        with pytest.raises(hpc.BatchSizeError, match="prefix has 2 rows"):
            llama.generate(prompt, prefix=prefix)
    with pytest.raises(hpc.InputMismatchError, match="prefix is a str; pass a snapshot from prefill"):
        llama.generate(prompt, prefix="hello")
    with pytest.raises(hpc.InputMismatchError, match="attention_mask goes with prompts that are a tensor"):
        llama.generate([[5, 6]], attention_mask=torch.ones(1, 2))


def test_options_of_the_wrapper(tiny_model):
    model = tiny_model("llama")
    with pytest.raises(hpc.UnknownStrategyError, match="strategy is 'dynamic'; the strategies are prefix-dynamic"):
        hpc.PrefixCachedModel(model, strategy="dynamic")
    store = hpc.PrefixStore(max_bytes=100_000)
    with pytest.raises(hpc.UnknownOptionError, match="pass either store or memory_budget"):
        hpc.PrefixCachedModel(model, store=store, memory_budget=5)
    with pytest.raises(hpc.InvalidBudgetError):
        hpc.PrefixCachedModel(model, memory_budget=0)
    hpc.PrefixCachedModel(model, store=store).prefill(tokens(1, 8))
    assert len(store) == 1
    wrapped = hpc.PrefixCachedModel(model, memory_budget=50_000)
    assert hpc.store_for(model).max_bytes == 50_000
    for seed in range(30):  # more than the budget holds
        wrapped.generate(tokens(1, 30, seed=seed), **GREEDY)
        assert hpc.store_for(model).nbytes <= 50_000
    assert torch.equal(wrapped.generate(tokens(1, 30), **GREEDY), generated(model, tokens(1, 30)))


# -- forward ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_suffixes_get_the_logits_of_their_own_rows(side, wrapped):
    model, lengths = wrapped.model, (4, 1, 6, 4)
    prefix = wrapped.prefill(tokens(15))
    suffixes = [tokens(length, seed=seed) for seed, length in enumerate(lengths)]
    ids, mask = pad_left(*suffixes)
    if side == "right":
        ids = torch.stack([row.roll(int(count)) for row, count in zip(ids, mask.sum(1), strict=True)])
        mask = mask.flip(1)
    with torch.no_grad(), counted(model) as count:
        output = wrapped.forward(ids, prefix=prefix, attention_mask=mask)
    assert output.logits.shape == (4, 6, 99)
    for row, suffix in enumerate(suffixes):
        expected = logits_of(model, torch.cat([tokens(15), suffix]))[15:]
        torch.testing.assert_close(output.logits[row, mask[row].bool()], expected, atol=1e-4, rtol=0)
    report = wrapped.report()
    assert (report.prompt_tokens, report.computed_tokens, report.stored_tokens) == (4 * 15 + 15, 15, 15)
    grouped = not all(layer.is_sliceable for layer in prefix.layers)
    assert count.tokens == (15 if grouped else 4 * 6)  # groups by length leave padding out
    assert (output_cache(output) is None) == grouped
    assert not output.logits[~mask.bool()].any() or not grouped


def test_suffixes_of_equal_length_share_the_prefix_and_do_not_change_it(wrapped):
    model, prefix = wrapped.model, wrapped.prefill(tokens(15))
    before = [tensor.clone() for tensor in prefix.tensors]
    for rows, length in ((1, 1), (3, 5)):
        ids = tokens(rows, length, seed=rows)
        output = wrapped.forward(ids, prefix=prefix)
        for row in range(rows):
            expected = logits_of(model, torch.cat([tokens(15), ids[row]]))[15:]
            torch.testing.assert_close(output.logits[row], expected, atol=1e-4, rtol=0)
        assert output_cache(output).seq_length == 15 + length
    assert all(torch.equal(one, other) for one, other in zip(before, prefix.tensors, strict=True))


def test_a_cache_of_one_row_is_a_prefix_for_forward_too(wrapped):
    cache = wrapped.prefill(tokens(15)).to_cache()
    ids = tokens(2, 3)
    output = wrapped.forward(ids, prefix=cache)
    expected = logits_of(wrapped.model, torch.cat([tokens(15), ids[1]]))[15:]
    torch.testing.assert_close(output.logits[1], expected, atol=1e-4, rtol=0)
    assert cache.seq_length == 15


def test_gradients_flow_to_the_weights_through_the_suffixes(tiny_model):
    for name in ("llama", "mistral"):
        wrapped = hpc.PrefixCachedModel(tiny_model(name))
        ids, mask = pad_left(tokens(4), tokens(2))
        wrapped.forward(ids, prefix=wrapped.prefill(tokens(12)), attention_mask=mask).logits.sum().backward()
        assert wrapped.model.lm_head.weight.grad.abs().sum() > 0


def test_keywords_go_to_the_model_where_rows_run_together(llama, tiny_model):
    prefix, ids = llama.prefill(tokens(10)), tokens(2, 4)
    output = llama.forward(ids, prefix=prefix, labels=ids, output_hidden_states=True)
    assert output.loss is not None
    assert output.hidden_states[0].shape[:2] == (2, 4)
    windowed = hpc.PrefixCachedModel(tiny_model("mistral"))
    padded, mask = pad_left(tokens(4), tokens(2))
    with pytest.raises(
        hpc.UnsupportedModelError, match=r"run in groups on MistralForCausalLM.*leave out labels, output_h"
    ):
        windowed.forward(
            padded,
            prefix=windowed.prefill(tokens(10)),
            attention_mask=mask,
            labels=padded,
            output_hidden_states=True,
        )


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_prefix_with_padding_is_masked_or_refused(name, tiny_model):
    wrapped = hpc.PrefixCachedModel(tiny_model(name))
    prompt, prompt_mask = pad_left(tokens(12), tokens(9))
    cache = hpc.PrefixDynamicCache(config=wrapped.model.config)
    generated(wrapped.model, prompt[1:], attention_mask=prompt_mask[1:], max_new_tokens=1, **cache_argument(cache))
    ids, mask = pad_left(tokens(4), tokens(2))
    if name == "mistral":
        for call in ({"input_ids": ids, "attention_mask": mask}, {"input_ids": ids}):
            with pytest.raises(hpc.UnsupportedModelError, match="padding"):
                wrapped.forward(**call, prefix=cache)
        return
    logits = wrapped.forward(ids, prefix=cache, attention_mask=mask).logits
    for row in (0, 1):
        expected = logits_of(wrapped.model, torch.cat([tokens(9), ids[row][mask[row].bool()]]))[9:]
        torch.testing.assert_close(logits[row, mask[row].bool()], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize(
    ("ids", "mask", "error", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), None, hpc.InvalidTokensError, "at least one token"),
        (torch.tensor([[5, 99]]), None, hpc.InvalidTokensError, "the id 99"),
        (torch.tensor([[5.0]]), None, hpc.InvalidTokensError, "integers"),
        (tokens(2, 3), torch.ones(2, 4), hpc.InputMismatchError, r"attention_mask has shape \[2, 4\]"),
        (tokens(2, 3), torch.ones(1, 3), hpc.InputMismatchError, r"attention_mask has shape \[1, 3\]"),
        (tokens(2, 3), torch.full((2, 3), -1e9), hpc.InputMismatchError, "additive masks do not fit"),
        (tokens(2, 2), torch.tensor([[1, 1], [0, 0]]), hpc.InputMismatchError, "leaves row 1 without any token"),
    ],
)
def test_suffixes_that_do_not_fit_are_refused(name, ids, mask, error, message, tiny_model):
    wrapped = hpc.PrefixCachedModel(tiny_model(name))
    prefix = wrapped.prefill(tokens(10))
    with pytest.raises(error, match=message):
        wrapped.forward(ids, prefix=prefix, attention_mask=mask)
    torch.testing.assert_close(
        wrapped.forward(tokens(1, 3), prefix=prefix).logits[0],
        logits_of(wrapped.model, torch.cat([tokens(10), tokens(1, 3)[0]]))[10:],
        atol=1e-4,
        rtol=0,
    )


def test_models_of_every_kind_are_covered():
    assert set(FULL_ATTENTION) < set(TINY_MODELS)
