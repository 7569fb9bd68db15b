"""Attention masks of a packed tree: the model's own mask, measured in depth, and each token sees its ancestors only.

Transformers builds a model's masks from a function of two positions (causal, window, chunk ...) by the interface
registered for the model's attention implementation. While a packed forward runs, that interface is wrapped: the
positions handed to the function are depths in the tree, and what is no ancestor is masked. So every family of models
gets the mask in the form its attention takes (boolean, additive, block mask), windows and chunks measure the right
distance, and no setting of the model is touched. The wrapper acts in the thread that packs and passes every other
call through; it is taken away when the last packed forward ends. Attention is wrapped likewise, to run in blocks
or, on an accelerator, in the way that was measured to be fastest.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from ..attention import install
from ..exceptions import UnsupportedModelError
from .blocks import AttentionBlock, attend_in_blocks
from .measured import AttentionChoice, attend_as_measured

__all__ = ["MASKED_IMPLEMENTATIONS", "TreeLayout", "packed_attention", "tree_layout"]

MASKED_IMPLEMENTATIONS = frozenset({"eager", "flex_attention", "sdpa"})
"""Attention implementations that take an arbitrary mask."""

_lock = threading.Lock()
_users: dict[str, int] = {}
_shadowed: dict[tuple[int, str], Callable[..., Any]] = {}
_layout: ContextVar["TreeLayout | None"] = ContextVar("hf_prefix_cache_tree_layout", default=None)


@dataclass(frozen=True)
class TreeLayout:
    """Where the tokens of one packed forward stand in the tree; all int64 on the model's device.

    Attributes:
        query_nodes: Nodes of the new tokens, ``[new]``.
        query_depths: Their depths, ``[new]``.
        key_nodes: Nodes of the cached path and of the new tokens, ``[cached + new]``.
        key_depths: Their depths, ``[cached + new]``.
        key_ends: One past the last descendant of each, ``[cached + new]``.
        blocks: How attention is cut where what is masked costs time; none to attend to everything at once.
        on_choice: On an accelerator, where the way of attention is measured: called with the choice.
        prepared: Masks of the blocks, kept from layer to layer.
    """

    query_nodes: torch.Tensor
    query_depths: torch.Tensor
    key_nodes: torch.Tensor
    key_depths: torch.Tensor
    key_ends: torch.Tensor
    blocks: tuple[AttentionBlock, ...] = ()
    on_choice: Callable[[AttentionChoice], object] | None = None
    prepared: dict[Any, Any] = field(default_factory=dict)


@contextmanager
def packed_attention(implementation: str) -> Iterator[None]:
    """Make masks and attention of ``implementation`` heed `tree_layout` for as long as the context lasts."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # not at import: it takes seconds

    install()  # first, so that what is wrapped here knows shared prefixes too
    with _lock:
        if not _users.get(implementation):
            _shadow(ALL_MASK_ATTENTION_FUNCTIONS, implementation, _tree_aware)
            if implementation == "sdpa":
                _shadow(ALL_ATTENTION_FUNCTIONS, "sdpa", _layout_aware)
        _users[implementation] = _users.get(implementation, 0) + 1
    try:
        yield
    finally:
        with _lock:
            _users[implementation] -= 1
            if not _users[implementation]:
                _unshadow(ALL_MASK_ATTENTION_FUNCTIONS, implementation)
                if implementation == "sdpa":
                    _unshadow(ALL_ATTENTION_FUNCTIONS, "sdpa")


@contextmanager
def tree_layout(layout: TreeLayout) -> Iterator[None]:
    """Let masks built in this thread follow ``layout``."""
    token = _layout.set(layout)
    try:
        yield
    finally:
        _layout.reset(token)


def _shadow(interfaces: Any, name: str, wrap: Callable[..., Any]) -> None:
    # The instance's own entry stands before the registered one, which stays as it is.
    _shadowed[id(interfaces), name] = interfaces[name]
    interfaces[name] = wrap(interfaces[name])


def _unshadow(interfaces: Any, name: str) -> None:
    before = _shadowed.pop((id(interfaces), name))
    del interfaces[name]
    if interfaces[name] is not before:
        interfaces[name] = before  # it was an own entry, too


def _layout_aware(attend: Callable[..., Any]) -> Callable[..., Any]:
    def attention(*args: Any, **kwargs: Any) -> Any:
        layout = _layout.get()
        if layout is not None and layout.on_choice is not None:
            return attend_as_measured(attend, layout.blocks, layout.prepared, layout.on_choice)(*args, **kwargs)
        if layout is None or not layout.blocks:
            return attend(*args, **kwargs)
        return attend_in_blocks(attend, layout.blocks, layout.prepared)(*args, **kwargs)

    return attention


def _tree_aware(interface: Callable[..., Any]) -> Callable[..., Any]:
    def build_mask(*args: Any, **kwargs: Any) -> Any:
        layout = _layout.get()
        if layout is None:
            return interface(*args, **kwargs)
        expected = (1, len(layout.query_nodes), len(layout.key_nodes))
        asked = (kwargs["batch_size"], kwargs["q_length"], kwargs["kv_length"])
        if args or asked != expected:
            raise UnsupportedModelError(
                f"the model asked for a mask of (rows, queries, keys) {asked}, but the packed tree has {expected}: it "
                "does not attend to one row of tokens and their cache alone; score it without packing"
            )
        own = kwargs["mask_function"]

        def is_visible(batch: Any, head: Any, query: Any, key: Any) -> torch.Tensor:
            node = layout.query_nodes[query]
            is_ancestor = (layout.key_nodes[key] <= node) & (node < layout.key_ends[key])
            return is_ancestor & own(batch, head, layout.query_depths[query], layout.key_depths[key])

        kwargs |= {"mask_function": is_visible, "attention_mask": None, "allow_is_causal_skip": False}
        # Offsets turn rows into positions, which the layout does already.
        return interface(**kwargs | {"q_offset": 0, "kv_offset": 0})

    return build_mask
