"""The operations that are checked, each at one split point; after each the source is looked at as well."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..caches import PrefixCache
from ..compat import cache_argument
from ..exceptions import NotCroppableError
from ..model import PrefixCachedModel
from ..oracle import Ids, continued
from ..scoring.model_access import input_device
from ..snapshot import PrefixSnapshot
from .case import Case, Findings
from .generation import check_generate

__all__ = ["OPERATIONS"]


def _snapshot(case: Case, split: int, to: Findings) -> None:
    """A snapshot is continued, again and again, after its cache went on; the cache goes on rightly, too."""
    prefix = case.prefix(split)
    cache = case.filled(prefix)
    snapshot = cache.snapshot()
    first, second, _ = case.texts.streams
    case.compare(continued(case.model, cache, [second]), prefix, [second], to)
    for length in case.texts.suffixes:
        other = snapshot.to_cache(**case.options)
        case.compare(continued(case.model, other, [first[:length]]), prefix, [first[:length]], to)


def _restore(case: Case, split: int, to: Findings) -> None:
    """A cache that held something else goes back to a snapshot, twice."""
    prefix = case.prefix(split)
    snapshot = case.filled(prefix).snapshot()
    first, second, third = case.texts.streams
    cache = case.filled(third)
    for length, stream in zip(case.texts.suffixes[1:], (second, first), strict=True):
        cache.restore(snapshot)
        case.compare(continued(case.model, cache, [stream[:length]]), prefix, [stream[:length]], to)


def _fork(case: Case, split: int, to: Findings) -> None:
    """Two batches are forked from one row and fed in turns; each and their parent see their own tokens only."""
    prefix = case.prefix(split)
    parent = case.filled(prefix)
    first, second, third = streams = case.texts.streams
    length = case.texts.suffixes[-1]
    ours, theirs = [stream[:length] for stream in streams], [stream[::-1][:length] for stream in streams]
    left, right = parent.fork(batch_size=len(ours)), parent.fork(batch_size=len(theirs))
    case.compare(continued(case.model, left, ours), prefix, ours, to)
    case.compare(continued(case.model, right, theirs), prefix, theirs, to)
    _compare_ends(case, left, prefix, ours, (third[-1], first[-1], second[-1]), to)
    case.compare(continued(case.model, parent, [third[:1]]), prefix, [third[:1]], to)


def _reorder(case: Case, split: int, to: Findings) -> None:
    """Rows of a batch are put in another order behind the prefix they share, as beams are."""
    prefix = case.prefix(split)
    first, second, third = case.texts.streams
    own = [stream[:2] for stream in (first, second, third)]
    batch = case.filled(prefix).fork(batch_size=len(own))
    continued(case.model, batch, own)
    order = [2, 0, 0]
    batch.reorder_cache(torch.tensor(order))
    _compare_ends(case, batch, prefix, [own[place] for place in order], first[3:6], to)
    batch.batch_select_indices(torch.tensor([1]))
    kept = own[order[1]] + (first[4],)
    _compare_ends(case, batch, prefix, [kept], second[5:6], to)


def _compare_ends(case: Case, cache: PrefixCache, prefix: Ids, held: list[Ids], ends: Ids, to: Findings) -> None:
    """Feed one more token to each row, and compare."""
    found = continued(case.model, cache, [(token,) for token in ends])
    for row, own, end in zip(found, held, ends, strict=True):
        suffix = (*own, end)
        to.add(*case.oracle.judge(row, case.expected(prefix, suffix)[-1:], prefix, suffix))


def _crop(case: Case, split: int, to: Findings) -> None:
    """Tokens are taken back, and others fed; where that is refused, the cache is as it was."""
    prefix, (first, second, _) = case.prefix(split), case.texts.streams
    for length in (case.texts.suffixes[0], case.texts.suffixes[-1]):
        longer = prefix + second[:length]
        cache = case.filled(longer)
        if cache.can_crop_to(split):
            cache.crop_to(split)
            case.compare(continued(case.model, cache, [first[:2]]), prefix, [first[:2]], to, taken_from=longer)
            continue
        try:
            cache.crop_to(split)
        except NotCroppableError as error:
            to.refuse(error)
        else:
            raise AssertionError("can_crop_to said no, and crop_to did it all the same")
        kept = Findings()
        case.compare(continued(case.model, cache, [first[:2]]), longer, [first[:2]], kept)
        if kept.ratio > 1:
            to.add(kept.worst, kept.tolerance)  # only a wrong one counts: nothing was cropped


def _padding(case: Case, split: int, to: Findings) -> None:
    """Suffixes of unequal length run as one batch, padded on either side, in a raw forward call."""
    prefix, lengths = case.prefix(split), case.texts.suffixes
    suffixes = [stream[:length] for stream, length in zip(case.texts.streams, lengths, strict=False)]
    parent = case.filled(prefix)
    for side in ("left", "right"):
        ids, mask = _padded(suffixes, side, input_device(case.model))
        batch = parent.fork(batch_size=len(suffixes))
        inputs = batch.prepare_inputs(ids, mask)
        logits = case.model(**inputs._asdict(), use_cache=True, return_dict=True, **cache_argument(batch)).logits
        _compare_padded(case, logits, mask, prefix, suffixes, to)


def _forward(case: Case, split: int, to: Findings) -> None:
    """The same through the wrapper, which finds a way for every model."""
    prefix, lengths = case.prefix(split), case.texts.suffixes
    suffixes = [stream[:length] for stream, length in zip(case.texts.streams, lengths, strict=False)]
    snapshot = _told(case, prefix)
    wrapper = PrefixCachedModel(case.model, strategy=case.strategy)
    for side in ("left", "right"):
        ids, mask = _padded(suffixes, side, input_device(case.model))
        logits = wrapper.forward(ids, prefix=snapshot, attention_mask=mask).logits
        _compare_padded(case, logits, mask, prefix, suffixes, to)


def _told(case: Case, prefix: Ids) -> PrefixSnapshot:
    return case.filled(prefix).snapshot(model=case.model, input_ids=torch.tensor([prefix]))


def _padded(suffixes: list[Ids], side: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(len(suffix) for suffix in suffixes)
    rows, masks = [], []
    for suffix in suffixes:
        padding = [suffix[0]] * (width - len(suffix))
        blank, ones = [0] * len(padding), [1] * len(suffix)
        rows.append([*padding, *suffix] if side == "left" else [*suffix, *padding])
        masks.append([*blank, *ones] if side == "left" else [*ones, *blank])
    return torch.tensor(rows, device=device), torch.tensor(masks, device=device)


def _compare_padded(
    case: Case, logits: torch.Tensor, mask: torch.Tensor, prefix: Ids, suffixes: list[Ids], to: Findings
) -> None:
    for row, tokens, suffix in zip(logits, mask.bool(), suffixes, strict=True):
        case.compare(row[tokens][None], prefix, [suffix], to)


OPERATIONS: dict[str, Callable[[Case, int, Findings], None]] = {
    "snapshot": _snapshot,
    "restore": _restore,
    "fork": _fork,
    "reorder": _reorder,
    "crop": _crop,
    "padding": _padding,
    "forward": _forward,
    "generate": check_generate,
}
"""What is checked with each strategy, at each split point."""
