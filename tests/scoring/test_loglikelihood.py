import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from hf_prefix_cache.compat import CACHE_ARGUMENT
from hf_prefix_cache.exceptions import CacheCapacityError, InvalidTokensError, RequestError
from hf_prefix_cache.scoring import last_scoring_report, loglikelihood
from hf_prefix_cache.scoring.model_access import forward_accepts
from scoring.models import NOT_PACKED, ORIGINAL_MAX, PACKED
from scoring.oracle import assert_scores_match, plain_scores, request_sets
from tiny_models import MAX_POSITIONS, VOCAB_SIZE

# Mamba's reference implementation loops over tokens in Python.
SLOW = {"mamba", "falcon_mamba", "jamba", "mamba2"}
building_with_peft = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
FEW_SHOT = [5, 9, 12, 7, 30, 41, 5, 9, 2, 77, 15, 3, 8]
REQUESTS = [
    ([*FEW_SHOT, 20, 21], [22, 23]),
    ([*FEW_SHOT, 20, 21], [24]),
    ([*FEW_SHOT, 20, 21, 25], [26, 27, 28]),
    ([*FEW_SHOT, 60], [61]),
    ([*FEW_SHOT, 60], [61]),
    ([4, 4, 4], [5, 6]),
]


def implementations(model) -> list[str]:
    own = model.config._attn_implementation
    if own != "sdpa":
        return [own]
    return ["sdpa", "eager"]


@pytest.mark.parametrize("name", [*PACKED, *NOT_PACKED])
def test_random_request_sets_score_as_plain_rows_do(name: str) -> None:
    model = {**PACKED, **NOT_PACKED}[name]()
    examples = 3 if name in SLOW else 8

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(requests=request_sets(), max_batch_tokens=st.sampled_from([3, 8, 512]))
    def check(requests: list, max_batch_tokens: int) -> None:
        scores = loglikelihood(model, requests, max_batch_tokens=max_batch_tokens, progress=False)
        assert_scores_match(scores, expected(requests))
        report = last_scoring_report(model)
        if name in PACKED and name != "phi3_longrope":
            assert report.computed_tokens == report.unique_tokens

    for implementation in implementations(model):
        model.set_attn_implementation(implementation)
        oracle = {**PACKED, **NOT_PACKED}[name]()
        oracle.set_attn_implementation(implementation)

        def expected(requests: list, oracle=oracle) -> list:
            return plain_scores(oracle, requests)

        check()
        if name in PACKED:
            assert last_scoring_report(model).route == "packed"


@pytest.mark.parametrize("name", NOT_PACKED)
def test_models_that_cannot_be_packed_take_an_exact_route(name: str) -> None:
    model = NOT_PACKED[name]()
    assert_scores_match(loglikelihood(model, REQUESTS, progress=False), plain_scores(model, REQUESTS))
    report = last_scoring_report(model)
    # Mamba 2 has another name for its cache before 5.24.
    is_forked = name not in {"mamba", "falcon_mamba", "jamba"} and forward_accepts(model, CACHE_ARGUMENT)
    assert report.route == ("forked" if is_forked else "rows")
    if report.route == "forked":
        assert report.computed_tokens == report.unique_tokens


def test_scores_come_in_the_order_asked_and_duplicates_cost_nothing() -> None:
    model = PACKED["llama"]()
    shuffled = [REQUESTS[place] for place in (3, 0, 5, 1, 4, 2)] * 3
    assert_scores_match(loglikelihood(model, shuffled, progress=False), plain_scores(model, shuffled))
    repeated = last_scoring_report(model)
    loglikelihood(model, REQUESTS, progress=False)
    once = last_scoring_report(model)
    assert repeated.computed_tokens == once.computed_tokens == once.unique_tokens
    assert repeated.requested_tokens == 3 * once.requested_tokens
    assert once.reused_tokens == once.requested_tokens - once.computed_tokens > 0


def test_empty_continuations_and_contexts_have_a_result() -> None:
    model = PACKED["llama"]()
    requests = [([7, 8], []), ([], []), ([], [9, 10]), ([], [1, 10]), ([], [1])]
    scores = loglikelihood(model, requests, progress=False)
    assert_scores_match(scores, plain_scores(model, requests))
    assert scores[0] == scores[1] == scores[4] == (0.0, True, ())
    assert [len(score.token_logprobs) for score in scores] == [0, 0, 2, 1, 0]
    assert loglikelihood(model, [], progress=False) == []


def test_an_empty_context_without_any_prefix_token_names_the_request() -> None:
    model = PACKED["llama"]()
    model.config.bos_token_id = model.config.eos_token_id = None
    with pytest.raises(RequestError, match="request 1 has an empty context"):
        loglikelihood(model, [([3], [4]), ([], [4])], progress=False)


def test_everything_on_the_model_is_as_it_was_after_success_and_error() -> None:
    model = PACKED["mistral"]()
    model.train()
    model.model.layers[0].eval()
    model.config.use_cache = False
    modes = [module.training for module in model.modules()]
    config = model.config.to_dict()
    masks = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("sdpa", "eager")}
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    class Interrupted(KeyboardInterrupt):
        pass

    loglikelihood(model, REQUESTS, progress=False)
    handle = model.model.layers[1].register_forward_hook(lambda *_: (_ for _ in ()).throw(Interrupted()))
    with pytest.raises(Interrupted):
        loglikelihood(model, REQUESTS, progress=False, self_check=False)
    handle.remove()

    assert [module.training for module in model.modules()] == modes
    assert model.config.to_dict() == config
    assert {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in masks} == masks
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, weights[name], atol=0, rtol=0)
    assert torch.is_grad_enabled()


def test_dropout_is_off_while_scoring_a_model_in_training() -> None:
    model = PACKED["gpt2"]()
    assert model.config.attn_pdrop > 0
    expected = plain_scores(model, REQUESTS)
    model.train()
    assert_scores_match(loglikelihood(model, REQUESTS, progress=False), expected)


def test_plain_calls_in_another_thread_are_untouched_while_a_tree_is_packed() -> None:
    model, other = PACKED["llama"](), PACKED["llama"]()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        expected = other(ids).logits
    seen = []

    def call_from_another_thread(*_: object) -> None:
        def run() -> None:
            with torch.no_grad():
                seen.append(other(ids).logits)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    model.model.layers[0].register_forward_hook(call_from_another_thread)
    loglikelihood(model, REQUESTS, progress=False, self_check=False, max_batch_tokens=8)
    assert len(seen) > 1
    for logits in seen:
        torch.testing.assert_close(logits, expected, atol=0, rtol=0)


def test_threads_may_score_one_model_at_once() -> None:
    model = PACKED["llama"]()
    model.train()
    expected = plain_scores(PACKED["llama"](), REQUESTS)
    results: list = []

    def score() -> None:
        results.append(loglikelihood(model, REQUESTS, progress=False, max_batch_tokens=8))

    threads = [threading.Thread(target=score) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    for scores in results:
        assert_scores_match(scores, expected)
    assert model.training


def test_token_ids_outside_the_vocabulary_name_the_request() -> None:
    model = PACKED["llama"]()
    with pytest.raises(InvalidTokensError, match=f"request 1 holds the token id {VOCAB_SIZE}"):
        loglikelihood(model, [([3], [4]), ([5], [VOCAB_SIZE])], progress=False)
    with pytest.raises(InvalidTokensError, match="request 0 holds the token id -1"):
        loglikelihood(model, [([-1], [4])], progress=False)


def test_requests_past_the_limit_raise_or_are_cut_from_the_left() -> None:
    model = PACKED["gpt2"]()
    long = [(i * 7) % 90 + 3 for i in range(MAX_POSITIONS + 20)]
    fits, too_long = (long[:MAX_POSITIONS], [4]), (long, [4, 5])
    assert_scores_match(loglikelihood(model, [fits], progress=False), plain_scores(model, [fits]))
    with pytest.raises(CacheCapacityError, match=f"request 1 needs {len(long) + 1} tokens.*at most {MAX_POSITIONS}"):
        loglikelihood(model, [fits, too_long], progress=False)
    cut = (long[len(long) + 2 - (MAX_POSITIONS + 1) :], [4, 5])
    scores = loglikelihood(model, [fits, too_long], truncation="left", progress=False)
    assert_scores_match(scores, plain_scores(model, [fits, cut]))
    with pytest.raises(CacheCapacityError, match="request 0 has a continuation of"):
        loglikelihood(model, [([3], long)], truncation="left", progress=False)


@pytest.mark.parametrize("wrong", [0, -3, 2.5])
def test_a_chunk_needs_at_least_one_token(wrong: object) -> None:
    with pytest.raises(CacheCapacityError, match=f"max_batch_tokens is {wrong}"):
        loglikelihood(PACKED["llama"](), REQUESTS, max_batch_tokens=wrong, progress=False)


@building_with_peft
def test_lora_adapters_are_part_of_what_is_scored() -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(PACKED["llama"](), peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    adapted = plain_scores(model.eval(), REQUESTS)
    assert_scores_match(loglikelihood(model, REQUESTS, progress=False), adapted)
    assert last_scoring_report(model).route == "packed"
    with model.disable_adapter():
        plain = plain_scores(model, REQUESTS)
        assert_scores_match(loglikelihood(model, REQUESTS, progress=False), plain)
    assert abs(adapted[0][0][0] - plain[0][0][0]) > 1e-2
    merged = model.merge_and_unload()
    assert_scores_match(loglikelihood(merged, REQUESTS, progress=False), adapted)


@building_with_peft
def test_learned_prompt_tokens_are_scored_plainly() -> None:
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(PACKED["llama"](), config).eval()
    scores = loglikelihood(model, REQUESTS, progress=False)
    assert last_scoring_report(model).route == "rows"
    for (context, rest), score in zip(REQUESTS, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *rest][:-1]])).logits[0, -len(rest) :]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(rest)[:, None]).sum().item()
        torch.testing.assert_close(score.logprob, expected, atol=1e-4, rtol=0)


def test_a_smaller_limit_can_be_asked_for() -> None:
    model = PACKED["llama"]()
    request = (FEW_SHOT, [20, 21])
    scores = loglikelihood(model, [request], max_length=5, truncation="left", progress=False)
    assert_scores_match(scores, plain_scores(model, [(FEW_SHOT[-4:], [20, 21])]))


def test_rows_past_the_rotary_regime_are_scored_plainly_and_the_others_packed() -> None:
    model = PACKED["phi3_longrope"]()
    long = [(i * 5) % 90 + 3 for i in range(2 * ORIGINAL_MAX)]
    requests = [
        (long[:ORIGINAL_MAX], [7]),
        (long[: ORIGINAL_MAX - 2], [7, 8]),
        (long[:ORIGINAL_MAX], [7, 8]),
        (long, [9]),
    ]
    expected = [plain_scores(PACKED["phi3_longrope"](), [request])[0] for request in requests]
    assert_scores_match(loglikelihood(model, requests, progress=False), expected)
    report = last_scoring_report(model)
    assert (report.route, report.plain_requests) == ("packed", 2)


def test_half_precision_scores_stay_near_plain_ones() -> None:
    model = PACKED["llama"]().to(torch.bfloat16)
    scores = loglikelihood(model, REQUESTS, progress=False)
    assert last_scoring_report(model).route == "packed"
    for score, (logprobs, _) in zip(scores, plain_scores(model.float(), REQUESTS), strict=True):
        torch.testing.assert_close(score.logprob, sum(logprobs), atol=0.5, rtol=0.05)


def test_log_probabilities_are_taken_in_the_type_asked_for() -> None:
    model = PACKED["llama"]()
    exact = loglikelihood(model, REQUESTS, softmax_dtype=torch.float64, progress=False)
    rough = loglikelihood(model, REQUESTS, softmax_dtype=torch.bfloat16, progress=False)
    assert_scores_match(exact, plain_scores(model, REQUESTS))
    for score in rough:
        as_bfloat16 = torch.tensor(score.token_logprobs, dtype=torch.float64)
        torch.testing.assert_close(as_bfloat16.bfloat16().double(), as_bfloat16, atol=0, rtol=0)


def test_a_compiled_model_is_scored_by_the_model_inside() -> None:
    model = PACKED["llama"]()
    compiled = torch.compile(model, backend="eager")
    scores = loglikelihood(compiled, REQUESTS, progress=False)
    assert_scores_match(scores, plain_scores(model, REQUESTS))
    assert last_scoring_report(compiled).route == "packed"


def test_arrays_and_tensors_are_requests_too() -> None:
    model = PACKED["llama"]()
    as_tensors = [(torch.tensor(context), torch.tensor(rest).numpy()) for context, rest in REQUESTS]
    assert loglikelihood(model, as_tensors, progress=False) == loglikelihood(model, REQUESTS, progress=False)


def test_the_progress_bar_counts_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    model = PACKED["llama"]()
    loglikelihood(model, REQUESTS)
    assert f"{last_scoring_report(model).unique_tokens}" in capsys.readouterr().err
    loglikelihood(model, REQUESTS, progress=False)
    assert capsys.readouterr().err == ""


def test_scoring_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loglikelihood(PACKED["llama"](), REQUESTS, progress=False)
