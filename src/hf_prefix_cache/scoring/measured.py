"""Which way of computing a packed chunk's attention is fastest on an accelerator: the ways are timed, not guessed.

A packed chunk needs a mask, and a mask decides which kernels an accelerator can use. Four ways give the same result:
PyTorch's attention with the whole mask, attention in blocks, attention over what all tokens of the chunk see apart
from the rest, and FlexAttention with a block mask. At the first chunk of a size each is run on that chunk's own
queries and keys, and the fastest one that agrees with the first is used for chunks of this size from then on.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..attention import shared_prefix_attention
from ..layers.state import KeyValues
from .blocks import AttentionBlock, attend_in_blocks, kept_for, seen_by_all, takes_boolean_mask

__all__ = ["AttentionChoice", "attend_as_measured", "is_measured"]

_RUNS = 3  # timed after one that warms up
_TOLERANCES = {torch.float32: 1e-4, torch.float64: 1e-8}
_HALF_TOLERANCE = 3e-2
_LEAST_FOR_FLEX = 2**16  # products of queries and keys from which on compiling FlexAttention can pay

Way = Callable[[], torch.Tensor]

_lock = threading.Lock()
_choices: dict[tuple[Any, ...], "AttentionChoice"] = {}
_compiled: list[Callable[..., torch.Tensor]] = []


class AttentionChoice(NamedTuple):
    """The way chosen for chunks of one size, and what each way took.

    Attributes:
        way: ``"masked"``, ``"blocks"``, ``"shared"`` or ``"flex"``.
        milliseconds: Median time of each way that agreed with ``"masked"``.
    """

    way: str
    milliseconds: dict[str, float]

    def __str__(self) -> str:
        return f"{self.way} ({', '.join(f'{name} {spent:.2f} ms' for name, spent in self.milliseconds.items())})"


def is_measured(device: torch.device) -> bool:
    """Return whether ways are timed on ``device``; on a CPU it is known that blocks are fastest where they apply."""
    return device.type != "cpu"


def attend_as_measured(
    attend: Callable[..., Any],
    blocks: Sequence[AttentionBlock],
    prepared: dict[Any, Any],
    on_choice: Callable[[AttentionChoice], object],
) -> Callable[..., Any]:
    """Return scaled dot-product attention by the fastest way, with the interface of Transformers' ``attend``.

    Args:
        attend: Attention with the whole mask.
        blocks: Blocks of the chunk; none leaves this way out.
        prepared: Keeps what is made of a mask for the layers that share it; filled here.
        on_choice: Called with the choice at each use.
    """
    in_blocks = attend_in_blocks(attend, blocks, prepared)

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        arguments = (module, query, key, value, attention_mask, dropout, scaling)

        def masked() -> torch.Tensor:
            return attend(*arguments, **kwargs)[0]

        if attention_mask is None or not takes_boolean_mask(query, key, attention_mask, dropout, kwargs):
            return masked(), None
        mask = attention_mask
        ways: dict[str, Way] = {"masked": masked}
        if blocks:
            ways["blocks"] = lambda: in_blocks(*arguments, **kwargs)[0]
        if seen_by_all(mask, prepared):
            ways["shared"] = lambda: _shared(query, key, value, mask, scaling, prepared)
        if query.shape[2] * key.shape[2] >= _LEAST_FOR_FLEX:
            ways["flex"] = lambda: _flex(query, key, value, mask, scaling, prepared)
        choice = _choice(ways, query, key)
        on_choice(choice)
        return ways.get(choice.way, masked)(), None

    return attention


def _choice(ways: dict[str, Way], query: torch.Tensor, key: torch.Tensor) -> AttentionChoice:
    sizes = (query.shape[1], key.shape[1], query.shape[3], query.shape[2].bit_length(), key.shape[2].bit_length())
    place = (str(query.device), query.dtype, *sizes, *ways)
    with _lock:
        if place not in _choices:
            _choices[place] = _measure(ways, query)
        return _choices[place]


def _measure(ways: dict[str, Way], query: torch.Tensor) -> AttentionChoice:
    expected = ways["masked"]()
    tolerance = _TOLERANCES.get(query.dtype, _HALF_TOLERANCE)
    spent = {}
    for name, way in ways.items():
        try:
            found = way()
            if torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
                spent[name] = sorted(_milliseconds(way, query.device) for _ in range(_RUNS))[_RUNS // 2]
        except Exception:  # a kernel that this device or build lacks is one way less
            if name == "masked":
                raise
    return AttentionChoice(min(spent, key=spent.__getitem__, default="masked"), spent)


def _milliseconds(way: Way, device: torch.device) -> float:
    accelerator = torch.accelerator if device.type != "cpu" else None
    if accelerator is not None:
        accelerator.synchronize(device)
    begun = time.perf_counter()
    way()
    if accelerator is not None:
        accelerator.synchronize(device)
    return 1e3 * (time.perf_counter() - begun)


def _shared(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    prepared: dict[Any, Any],
) -> torch.Tensor:
    seen = seen_by_all(mask, prepared)

    def additive() -> torch.Tensor:
        own = mask[..., seen:]
        # The lowest number, not minus infinity: a query that sees none of these keys still has a log-sum-exp.
        return torch.zeros(own.shape, dtype=query.dtype, device=own.device).masked_fill(
            ~own, torch.finfo(query.dtype).min
        )

    own_mask = kept_for(mask, f"shared {query.dtype}", prepared, additive)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    shared = KeyValues(key[:, :, :seen], value[:, :, :seen])
    own = KeyValues(key[:, :, seen:], value[:, :, seen:])
    return shared_prefix_attention(query, (shared,), own, own_mask, scale).transpose(1, 2).contiguous()


def _flex(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    prepared: dict[Any, Any],
) -> torch.Tensor:
    from torch.nn.attention.flex_attention import create_block_mask  # not at import: it takes a while

    visible = mask[0, 0]

    def is_visible(_batch: Any, _head: Any, query_place: Any, key_place: Any) -> torch.Tensor:
        return visible[query_place, key_place]

    def make() -> Any:
        queries, keys = visible.shape
        return create_block_mask(is_visible, None, None, queries, keys, device=visible.device)

    block_mask = kept_for(mask, "flex", prepared, make)
    is_grouped = query.shape[1] != key.shape[1]
    output = _flex_kernel()(query, key, value, block_mask=block_mask, scale=scaling, enable_gqa=is_grouped)
    return output.transpose(1, 2).contiguous()


def _flex_kernel() -> Callable[..., torch.Tensor]:
    """Return FlexAttention compiled for any length; uncompiled it would hold all scores."""
    from torch.nn.attention.flex_attention import flex_attention

    if not _compiled:
        _compiled.append(torch.compile(flex_attention, dynamic=True))
    return _compiled[0]
