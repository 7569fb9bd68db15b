"""Random sequences of every operation, against plain lists of tokens and the caches of Transformers.

Keys and values say which token, head and layer they belong to, so that any stale or misplaced one shows; spare room
and buffers beyond what is held are poisoned with NaN after every step.
"""

from dataclasses import dataclass, replace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from transformers import DynamicCache, Gemma3TextConfig, Llama4TextConfig, LlamaConfig, MistralConfig, StaticCache

import hf_prefix_cache as hpc
from hf_prefix_cache.exceptions import BatchSizeError, CacheCapacityError, NotCroppableError
from hf_prefix_cache.layers import growing

WINDOW, ROOM, MOST_ROWS, HEADS = 4, 20, 4, 2
SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": HEADS, "hidden_size": 4, "head_dim": 2}
CONFIGS = {
    "full": LlamaConfig(**SIZES, num_hidden_layers=1),
    "sliding": MistralConfig(**SIZES, num_hidden_layers=1, sliding_window=WINDOW),
    "chunked": Llama4TextConfig(**SIZES, num_hidden_layers=1, no_rope_layers=[1], attention_chunk_size=WINDOW),
    "sliding and full": Gemma3TextConfig(
        **SIZES, num_hidden_layers=2, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"]
    ),
}
MODES = {"gradients": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
MODE = st.sampled_from(["no_grad", "no_grad", "inference_mode", "gradients"])
INDEX = st.integers(0, 99)  # of a cache or snapshot, modulo how many there are
TOKENS = st.integers(1, WINDOW + 3)
THEN = st.none() | st.tuples(TOKENS, MODE)  # what is fed after an operation: attention shows what it has done


@dataclass(frozen=True)
class Told:
    """What a cache or snapshot must hold: rows of tokens, and the first position that windows retain."""

    rows: tuple[tuple[int, ...], ...] = ()
    first: int = 0

    @property
    def length(self):
        return len(self.rows[0]) if self.rows else 0

    def can_crop_to(self, length, has_windows):
        needed = max(0, length - WINDOW + 1) if has_windows else self.length
        return length == 0 or (0 < length <= self.length and self.first <= needed)

    def after_window(self, has_windows):
        return replace(self, first=max(self.first, self.length - WINDOW)) if has_windows else self

    def crop_to(self, length):
        return replace(self, rows=tuple(row[:length] for row in self.rows)) if length else Told()

    def select(self, order):
        return replace(self, rows=tuple(self.rows[row] for row in order)) if self.rows else self


@dataclass
class Live:
    cache: Any
    told: Told
    records: bool = False


def encode(rows, layer):
    tokens = torch.tensor(rows, dtype=torch.float32)[:, None, :, None].expand(-1, HEADS, -1, 2)
    heads = torch.arange(HEADS).reshape(1, HEADS, 1, 1) / 4 + layer / 2
    keys = tokens + heads + torch.tensor([0.0, 0.125])
    return keys, -keys


class RandomOperations(RuleBasedStateMachine):
    strategy = kind = ""

    @initialize(tokens=TOKENS, rows=st.integers(1, 3), mode=MODE)
    def start(self, tokens, rows, mode):
        self.config = CONFIGS[self.kind]
        self.is_static = self.strategy == "prefix-static"
        self.options = {"max_cache_len": ROOM, "max_batch_size": MOST_ROWS} if self.is_static else {}
        self.cache_class = hpc.PrefixStaticCache if self.is_static else hpc.PrefixDynamicCache
        self.windows = [layer.window for layer in self.cache_class(config=self.config, **self.options).layers]
        self.has_windows = any(self.windows)
        self.live, self.snapshots, self.next_token = [], [], 1
        self.start_another(tokens, rows, mode)

    def _pick(self, index):
        return self.live[index % len(self.live)]

    def _add(self, cache, told, records=False):
        self.live = [*self.live[-2:], Live(cache, told, records)]

    def _loaded(self, told):
        return told.after_window(self.has_windows) if self.is_static else told

    def _feed(self, live, tokens, mode, rows=1):
        rows = len(live.told.rows) or rows
        if self.is_static and live.told.length + tokens > ROOM:
            with pytest.raises(CacheCapacityError):
                live.cache.update(*encode([[0] * tokens] * rows, 0), 0)
            return
        numbers = range(self.next_token, self.next_token + rows * tokens)
        added = [numbers[row * tokens : (row + 1) * tokens] for row in range(rows)]
        self.next_token = numbers.stop
        before, length = live.told.rows or ((),) * rows, live.told.length
        live.told = replace(live.told, rows=tuple((*old, *new) for old, new in zip(before, added, strict=True)))
        plain = StaticCache(self.config, ROOM) if self.is_static else DynamicCache(config=self.config)
        for layer, window in enumerate(self.windows):
            if length:
                plain.update(*encode(before, layer), layer)
            sizes = live.cache.get_mask_sizes(tokens, layer)
            assert sizes == plain.get_mask_sizes(tokens, layer)
            with MODES[mode]():
                found = live.cache.update(*encode(added, layer), layer)
            expected = plain.update(*encode(added, layer), layer)
            start = 0 if window is None else max(0, length - window + 1)
            seen = slice(start - sizes[1], length + tokens - sizes[1])
            assert seen.start >= 0
            attended = encode([row[start:] for row in live.told.rows], layer)
            for ours, theirs, right in zip(found, expected, attended, strict=True):
                assert ours.shape == theirs.shape
                assert ours.shape[2] == sizes[0]
                assert torch.equal(ours[:, :, seen], right)
                assert torch.equal(theirs[:, :, seen], right)
        live.told = live.told.after_window(self.has_windows and not live.records)

    def _then(self, live, then):
        if then is not None:
            self._feed(live, *then)

    def _crop(self, live, length, call, argument):
        assert live.cache.can_crop_to(length) == live.told.can_crop_to(length, self.has_windows)
        if live.cache.can_crop_to(length):
            call(argument)
            live.told = live.told.crop_to(length).after_window(self.has_windows)
        else:
            with pytest.raises(ValueError if call == live.cache.crop and argument > 0 else NotCroppableError):
                call(argument)

    # -- operations --------------------------------------------------------------------------------------------------

    @rule(tokens=TOKENS, rows=st.integers(1, 3), mode=MODE)
    def start_another(self, tokens, rows, mode):
        self._add(self.cache_class(config=self.config, **self.options), Told())
        self._feed(self.live[-1], tokens, mode, rows)

    @rule(index=INDEX, tokens=TOKENS, rows=st.integers(1, 3), mode=MODE)
    def update(self, index, tokens, rows, mode):
        live = self._pick(index)
        if live.told.rows and rows != len(live.told.rows):
            full = self.is_static and live.told.length == ROOM
            with pytest.raises(CacheCapacityError if full else BatchSizeError):
                live.cache.update(*encode([[0]] * rows, 0), 0)
        self._feed(live, tokens, mode, rows)

    @rule(index=INDEX)
    def snapshot(self, index):
        live = self._pick(index)
        if live.told.rows:
            self.snapshots = [*self.snapshots[-3:], (live.cache.snapshot(), live.told)]

    @precondition(lambda self: self.snapshots)
    @rule(index=INDEX, which=INDEX, then=THEN)
    def restore(self, index, which, then):
        live, (snapshot, told) = self._pick(index), self.snapshots[which % len(self.snapshots)]
        live.cache.restore(snapshot)
        live.told = self._loaded(told)
        self._then(live, then)

    @precondition(lambda self: self.snapshots)
    @rule(which=INDEX, rows=st.integers(0, 4), then=THEN)
    def continue_snapshot(self, which, rows, then):
        snapshot, told = self.snapshots[which % len(self.snapshots)]
        if not rows or len(told.rows) not in (1, rows):
            with pytest.raises(BatchSizeError):
                snapshot.to_cache(self.strategy, batch_size=rows, **self.options)
            return
        told = replace(told, rows=told.rows * (rows // len(told.rows)))
        self._add(snapshot.to_cache(self.strategy, batch_size=rows, **self.options), self._loaded(told))
        self._then(self.live[-1], then)

    @precondition(lambda self: self.snapshots)
    @rule(which=INDEX, length=st.integers(0, ROOM))
    def crop_snapshot(self, which, length):
        snapshot, told = self.snapshots[which % len(self.snapshots)]
        assert snapshot.can_crop_to(length) == told.can_crop_to(length, self.has_windows)
        if not snapshot.can_crop_to(length):
            with pytest.raises(NotCroppableError):
                snapshot.crop_to(length)
        elif length:
            self.snapshots = [*self.snapshots[-3:], (snapshot.crop_to(length), told.crop_to(length))]

    @rule(index=INDEX, rows=st.none() | st.integers(0, 4), then=THEN, parent_goes_on=st.booleans())
    def fork(self, index, rows, then, parent_goes_on):
        live = self._pick(index)
        held = len(live.told.rows) or 1
        if rows is not None and (not rows or held not in (1, rows)):
            with pytest.raises(BatchSizeError):
                live.cache.fork(batch_size=rows)
            return
        told = replace(live.told, rows=live.told.rows * ((rows or held) // held))
        self._add(live.cache.fork(batch_size=rows), told, live.records)
        self._then(live if parent_goes_on else self.live[-1], then)

    @rule(index=INDEX, length=st.just(0) | st.integers(0, ROOM), relative=st.booleans(), then=THEN)
    def crop(self, index, length, relative, then):
        live = self._pick(index)
        if relative:
            self._crop(live, length, live.cache.crop, length - live.told.length)
        else:
            self._crop(live, length, live.cache.crop_to, length)
        self._then(live, then)

    @rule(index=INDEX, removed=st.integers(1, 4), then=THEN)
    def try_and_roll_back(self, index, removed, then):
        live = self._pick(index)
        self.snapshot(index)
        if removed <= live.told.length:
            self._crop(live, live.told.length - removed, live.cache.crop, -removed)
            self.snapshot(index)
        self._then(live, then)

    @rule(index=INDEX, order=st.lists(st.integers(0, 4), min_size=1, max_size=MOST_ROWS), then=THEN)
    def reorder(self, index, order, then):
        live = self._pick(index)
        if live.told.rows and max(order) >= len(live.told.rows):
            with pytest.raises(BatchSizeError):
                live.cache.reorder_cache(torch.tensor(order))
            order = [row % len(live.told.rows) for row in order]
        live.cache.reorder_cache(torch.tensor(order))
        live.told = live.told.select(order)
        self._then(live, then)

    @rule(index=INDEX, repeats=st.integers(0, 3), then=THEN)
    def repeat(self, index, repeats, then):
        live = self._pick(index)
        rows = len(live.told.rows)
        if not repeats or (self.is_static and repeats * rows > MOST_ROWS):
            with pytest.raises(BatchSizeError):
                live.cache.batch_repeat_interleave(repeats)
        elif repeats * rows <= 2 * MOST_ROWS:
            live.cache.batch_repeat_interleave(repeats)
            live.told = live.told.select([row for row in range(rows) for _ in range(repeats)])
        self._then(live, then)

    @rule(
        index=INDEX,
        chosen=st.lists(st.booleans(), min_size=1, max_size=MOST_ROWS),
        by_mask=st.booleans(),
        then=THEN,
    )
    def select(self, index, chosen, by_mask, then):
        live = self._pick(index)
        chosen = [chosen[row % len(chosen)] for row in range(len(live.told.rows))]
        kept = [row for row, keep in enumerate(chosen) if keep]
        if kept:
            live.cache.batch_select_indices(torch.tensor(chosen) if by_mask else torch.tensor(kept) - len(chosen))
            live.told = live.told.select(kept)
        self._then(live, then)

    @rule(index=INDEX, name=st.sampled_from(["reset", "activate_past_recording", "unshare"]), then=THEN)
    def reset_record_or_unshare(self, index, name, then):
        live = self._pick(index)
        if name == "reset":
            live.cache.reset()
            live.told = Told()
        elif not self.is_static:
            getattr(live.cache, name)()
            live.records |= name == "activate_past_recording"
        self._then(live, then)

    # -- what always holds -------------------------------------------------------------------------------------------

    @invariant()
    def everything_holds_what_it_was_told(self):
        for live in self.live:
            assert live.cache.seq_length == int(live.cache.get_seq_length()) == live.told.length
            assert live.cache.rows == (len(live.told.rows) or None)
            self._check([layer.state() for layer in live.cache.layers], live.told)
        for snapshot, told in self.snapshots:
            assert (snapshot.seq_length, snapshot.batch_size) == (told.length, len(told.rows))
            self._check(snapshot.layers, told)

    def _check(self, states, told):
        for layer, (state, window) in enumerate(zip(states, self.windows, strict=True)):
            first = 0 if window is None else told.first
            assert (state.length, state.first) == (told.length, first)
            if told.rows:
                right = encode([row[first:] for row in told.rows], layer)
                for parts, expected in zip(zip(*state.segments, strict=True), right, strict=True):
                    held = torch.cat([part.expand(len(told.rows), -1, -1, -1) for part in parts], dim=2)
                    assert torch.equal(held, expected)

    @invariant()
    @torch.inference_mode()  # in which every tensor may be written
    def poison_what_nobody_may_read(self):
        for live in self.live:
            for layer in live.cache.layers:
                if self.is_static:
                    for buffer in (tensor.detach() for tensor in layer.tensors()):
                        buffer[len(live.told.rows) :] = torch.nan
                        buffer[:, :, layer.held() :] = torch.nan
                        buffer[:, :, : layer.lost()] = torch.nan
                elif layer._own is not None:
                    for buffer in layer._own.tensors():
                        buffer[:, :, max(layer._own._stop, layer._own._frozen) :] = torch.nan


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("strategy", ["prefix-dynamic", "prefix-static"])
def test_any_sequence_of_operations_shows_attention_what_a_list_of_tokens_would(strategy, kind, monkeypatch):
    monkeypatch.setattr(growing, "_SPARE", 1)  # as much room again: few tokens are enough to write in place often
    machine = type("Machine", (RandomOperations,), {"strategy": strategy, "kind": kind})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
