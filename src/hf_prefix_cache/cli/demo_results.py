"""What the demo finds out. ``--json`` prints these values by their names."""

from dataclasses import dataclass

__all__ = ["Answer", "Branch", "DemoResult", "ForkResult", "Loss", "StrategyResult"]


@dataclass(frozen=True)
class Answer:
    """One question, asked without and with reuse.

    Attributes:
        question: What was asked.
        text: The answer with reuse.
        prompt_tokens: Tokens of the whole prompt; the uncached call computes them all.
        computed_tokens: Tokens of it that the call with reuse computed.
        reused_tokens: Tokens of it that it did not.
        seconds_plain: Time of the uncached call.
        seconds_reused: Time of the call with reuse.
        equal: Whether both gave the same tokens.
        equal_share: Share of the answer's tokens that are the same in both, from 0 to 1.
    """

    question: str
    text: str
    prompt_tokens: int
    computed_tokens: int
    reused_tokens: int
    seconds_plain: float
    seconds_reused: float
    equal: bool
    equal_share: float


@dataclass(frozen=True)
class Branch:
    """One continuation of a fork.

    Attributes:
        question: What was asked.
        text: The answer.
        equal: Whether its tokens are those of uncached generation.
        equal_share: Share of its tokens that are, from 0 to 1.
    """

    question: str
    text: str
    equal: bool
    equal_share: float


@dataclass(frozen=True)
class ForkResult:
    """Two forks of the prefix that go different ways, and the first of them taken back.

    Attributes:
        branches: How the two forks continued.
        went_back_by: How the first got back to the prefix: ``"crop_to"``, or ``"restore"`` where a window moved on.
        afterwards: How the first continued after that.
        shared_bytes: Bytes that the prefix's cache and the two forks took together before they continued.
        copied_bytes: Bytes that three copies take.
    """

    branches: tuple[Branch, ...]
    went_back_by: str
    afterwards: Branch
    shared_bytes: int
    copied_bytes: int


@dataclass(frozen=True)
class Loss:
    """What a strategy that is not exact gives up.

    Attributes:
        keys: Relative error of the prefix's keys, in the layer where it is largest.
        values: That of its values.
        equal_share: Share of the tokens of all answers that are those of uncached generation, from 0 to 1.
    """

    keys: float
    values: float
    equal_share: float


@dataclass(frozen=True)
class StrategyResult:
    """What one strategy did.

    Attributes:
        strategy: Its name.
        prefix_tokens: Tokens of the prefix.
        prefix_seconds: Time to compute it, once.
        prefix_bytes: Bytes that it takes where it is kept.
        cache_bytes: Bytes of a cache of this strategy that holds it.
        answers: One for each question.
        seconds_plain: Time of all uncached calls.
        seconds_reused: Time of all calls with reuse, and to compute the prefix.
        speed_up: How many times faster that was.
        fork: The forks.
        equal: Whether every answer was the uncached one.
        loss: What it gives up; None where it is exact, so that every answer must be the uncached one.
    """

    strategy: str
    prefix_tokens: int
    prefix_seconds: float
    prefix_bytes: int
    cache_bytes: int
    answers: tuple[Answer, ...]
    seconds_plain: float
    seconds_reused: float
    speed_up: float
    fork: ForkResult
    equal: bool
    loss: Loss | None


@dataclass(frozen=True)
class DemoResult:
    """All results, and what they were measured on.

    Attributes:
        model: Name of the model.
        device: Where it ran.
        dtype: Its precision.
        threads: Threads that PyTorch computed with.
        torch: Version of PyTorch.
        transformers: Version of Transformers.
        new_tokens: Tokens of each answer at most.
        strategies: One result for each strategy.
        equal: Whether every answer of every exact strategy was the uncached one.
    """

    model: str
    device: str
    dtype: str
    threads: int
    torch: str
    transformers: str
    new_tokens: int
    strategies: tuple[StrategyResult, ...]
    equal: bool
