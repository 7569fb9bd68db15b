"""Which layer class holds which of Transformers' layer types, for caches that grow and for caches of fixed size."""

from collections.abc import Callable, Mapping
from typing import Any

from ..compat import LayerSpec, layer_class
from ..exceptions import UnsupportedLayerError
from .dynamic import PrefixDynamicLayer, PrefixDynamicSlidingWindowLayer
from .hybrid import (
    PrefixHybridLayer,
    PrefixHybridSlidingWindowLayer,
    PrefixStaticHybridLayer,
    PrefixStaticHybridSlidingWindowLayer,
)
from .kept import KeptKind, kept_layer
from .nothing import PrefixNothingLayer
from .recurrent import PrefixRecurrentLayer
from .static import PrefixStaticLayer
from .static_indexed import INDEXED, PrefixStaticIndexedLayer
from .static_window import PrefixStaticSlidingWindowLayer

__all__ = ["DYNAMIC_KINDS", "STATIC_KINDS", "forget_layer_kind", "register_layer_kind"]


def _window(spec: LayerSpec) -> int:
    return int(spec.window or 0)


DYNAMIC_KINDS: dict[str, Callable[[LayerSpec], Any]] = {
    "full_attention": lambda spec: PrefixDynamicLayer(),
    "sliding_attention": lambda spec: PrefixDynamicSlidingWindowLayer(_window(spec)),
    "chunked_attention": lambda spec: PrefixDynamicSlidingWindowLayer(_window(spec)),
    "conv": lambda spec: PrefixRecurrentLayer(spec.states),
    "linear_attention": lambda spec: PrefixRecurrentLayer(spec.states),
    "hybrid": lambda spec: PrefixHybridLayer(spec.states),
    "hybrid_sliding": lambda spec: PrefixHybridSlidingWindowLayer(_window(spec), spec.states),
    "dummy": lambda spec: PrefixNothingLayer(),
}
"""Makes a layer that grows."""

STATIC_KINDS: dict[str, Callable[[LayerSpec, int], Any]] = {
    "full_attention": lambda spec, length: PrefixStaticLayer(max_cache_len=length),
    "sliding_attention": lambda spec, length: PrefixStaticSlidingWindowLayer(length, _window(spec)),
    "chunked_attention": lambda spec, length: PrefixStaticSlidingWindowLayer(length, _window(spec)),
    "conv": lambda spec, length: PrefixRecurrentLayer(spec.states),
    "linear_attention": lambda spec, length: PrefixRecurrentLayer(spec.states),
    "hybrid": lambda spec, length: PrefixStaticHybridLayer(length, spec.states),
    "hybrid_sliding": lambda spec, length: PrefixStaticHybridSlidingWindowLayer(length, _window(spec), spec.states),
    "dummy": lambda spec, length: PrefixNothingLayer(),
    "indexed_attention": lambda spec, length: PrefixStaticIndexedLayer(length),
}
"""Makes a layer of fixed size; the second argument is ``max_cache_len``."""

_OWN_KINDS = frozenset({*DYNAMIC_KINDS, "indexed_attention"})


def register_layer_kind(
    kind: str,
    *,
    batch_dims: Mapping[str, int | None] | None = None,
    token_dims: Mapping[str, int | None] | None = None,
    counters: tuple[str, ...] = (),
    writes_in_place: bool = True,
) -> None:
    """Teach this package a layer kind that a modeling file registers with Transformers.

    A layer of that kind is kept whole: every tensor, number, and dictionary of them that it holds is captured with a
    snapshot, given to forks, and put back by a restore. From then on `PrefixDynamicCache` and `PrefixOffloadedCache`
    serve models with such layers; run `hpc.check` on yours.

    Args:
        kind: The layer type, as in the configuration's ``layer_types`` and the class's ``_layer_type``.
        batch_dims: For attributes whose rows are not along the first dimension, that dimension; None for tensors that
            all rows share.
        token_dims: For each attribute with one entry per token held, the dimension of the tokens; None for tensors
            that do not grow. With it, tokens can be taken back with ``crop``; without it, a state can be continued
            from its end only. Leave it out where entries stand for several tokens, or where old ones are dropped.
        counters: Attributes that count tokens, plain ints, set when the layer is cropped.
        writes_in_place: False promises that the layer replaces its tensors and never writes into them, so that
            snapshots and forks share them.

    Raises:
        UnsupportedLayerError: A kind that this package knows already.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> hpc.register_layer_kind("my_attention", token_dims={"keys": -2, "values": -2, "marks": 1})
        >>> hpc.forget_layer_kind("my_attention")
    """
    if kind in _OWN_KINDS:
        raise UnsupportedLayerError(f"the layer kind {kind!r} is known already; register one of your own")
    keep = KeptKind(batch_dims or {}, token_dims, counters, writes_in_place)
    DYNAMIC_KINDS[kind] = lambda spec: _kept(spec, keep)


def forget_layer_kind(kind: str) -> None:
    """Take `register_layer_kind` back.

    Raises:
        UnsupportedLayerError: ``kind`` was not registered.

    Example:
        >>> import hf_prefix_cache as hpc
        >>> try:
        ...     hpc.forget_layer_kind("full_attention")
        ... except hpc.UnsupportedLayerError as error:
        ...     print(str(error)[:49])
        the layer kind 'full_attention' was not registere
    """
    if kind in _OWN_KINDS or kind not in DYNAMIC_KINDS:
        raise UnsupportedLayerError(f"the layer kind {kind!r} was not registered, so it cannot be forgotten")
    del DYNAMIC_KINDS[kind]


def _kept(spec: LayerSpec, keep: KeptKind) -> Any:
    found = layer_class(spec.kind)
    if found is None:
        raise UnsupportedLayerError(
            f"Transformers knows no cache layer for the kind {spec.kind!r}; import the modeling file that defines its "
            "class, with _layer_type set to that name, before making a cache"
        )
    return kept_layer(found, keep, spec.options)


DYNAMIC_KINDS["indexed_attention"] = lambda spec: _kept(spec, INDEXED)
# Kinds that Transformers' own modeling files register; each grows by concatenation.
register_layer_kind("minimax_m3_sparse", token_dims={"keys": -2, "values": -2, "idx_keys": -2}, writes_in_place=False)
register_layer_kind("compressed_sparse_attention", writes_in_place=False)
register_layer_kind("heavily_compressed_attention", writes_in_place=False)
