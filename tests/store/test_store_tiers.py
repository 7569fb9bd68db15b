"""What leaves memory goes to host memory and to files, and comes back exact, unless computing it is faster."""

import os
import random
import shutil
import threading
import time

import pytest
import torch
from store_prefixes import (
    FULL,
    RUNNING,
    SLIDING,
    TOKEN_BYTES,
    check_exact,
    common,
    longest_exact,
    make_snapshot,
)

from hf_prefix_cache.exceptions import InvalidBudgetError
from hf_prefix_cache.store import PrefixStore, lower_tiers
from hf_prefix_cache.store.directory import SnapshotDirectory

KINDS = [FULL, SLIDING, RUNNING]
FULL_TOKEN = len(FULL) * TOKEN_BYTES


def run_of(length, start=0):
    return [start + index for index in range(length)]


def files_in(path):
    return sorted(name for name in os.listdir(path) if name.endswith(".safetensors"))


def make_store(path, *, tokens=12, **options):
    """Return a store that holds ``tokens`` tokens, with a directory for the rest."""
    return PrefixStore(max_bytes=tokens * FULL_TOKEN, directory=path, **{"max_directory_bytes": 10**7, **options})


@pytest.fixture
def apart(monkeypatch):
    """Take the memory of this machine for an accelerator's."""
    monkeypatch.setattr(lower_tiers, "is_on_accelerator", lambda snapshot: True)


@pytest.mark.parametrize("kinds", KINDS)
def test_what_is_evicted_comes_back_from_the_directory(kinds, tmp_path):
    store = make_store(tmp_path)
    prompts = [run_of(10, start) for start in range(0, 500, 50)]
    for prompt in prompts:
        assert store.insert(make_snapshot(prompt, kinds, logits=False))
        store.sanity_check()
    assert len(store) < 3
    for prompt in prompts:
        found = store.match([*prompt, 999], "model")
        assert found.seq_length == 10
        check_exact(found, prompt, kinds)
        store.sanity_check()
    stats = store.stats()
    assert stats.returned >= 8
    assert stats.tiers[1].name == "directory"
    assert stats.tiers[1].entries == len(files_in(tmp_path)) == 10
    assert stats.tiers[1].bytes == sum((tmp_path / name).stat().st_size for name in files_in(tmp_path))


def test_a_part_of_a_file_serves_where_layers_can_be_cut_and_only_its_end_where_not(tmp_path):
    for kinds, usable in ((FULL, 7), (SLIDING, 0), (RUNNING, 0)):
        path = tmp_path / str(kinds)
        store = make_store(path)
        store.insert(make_snapshot(run_of(20)[:12], kinds, logits=False))
        store.flush()
        other = make_store(path)
        found = other.match([*run_of(7), 999], "model")
        assert (0 if found is None else found.seq_length) == usable
        assert other.match([*run_of(12), 999], "model").seq_length == 12


def test_what_was_written_serves_a_later_store_with_its_logits(tmp_path):
    store = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    store.insert(make_snapshot(run_of(10), logits=True))
    store.insert(make_snapshot(run_of(10), logits=True), "tenant")
    assert store.flush() == 2
    later = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    found = later.match(run_of(10), "model")
    assert found.next_logits is not None
    check_exact(found, run_of(10))
    assert later.match(run_of(10), "another model") is None
    assert later.match(run_of(10), "model", "nobody") is None
    assert later.match(run_of(10), "model", "tenant") is not None
    assert later.stats().returned == 2
    assert later.match(run_of(10), "model") is not None  # from memory now
    assert later.stats().returned == 2


def test_a_prefix_that_is_longer_in_memory_is_not_read_from_a_file(tmp_path):
    store = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    store.insert(make_snapshot(run_of(10)))
    store.flush()
    store.insert(make_snapshot(run_of(15)))
    assert store.match(run_of(20), "model").seq_length == 15
    assert store.stats().returned == 0


def test_what_is_too_large_for_memory_is_given_from_the_file(tmp_path):
    PrefixStore(max_bytes=1_000_000, directory=tmp_path).insert(make_snapshot(run_of(50)))
    large = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    large.insert(make_snapshot(run_of(50)))
    large.flush()
    small = make_store(tmp_path)
    check_exact(small.match(run_of(50), "model"), run_of(50))
    assert len(small) == 0
    small.sanity_check()


def test_the_directory_keeps_its_budget_and_drops_what_was_used_least_recently(tmp_path):
    store = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    store.insert(make_snapshot(run_of(10)))
    store.flush()
    (size,) = [path.stat().st_size for path in tmp_path.glob("*.safetensors")]
    store = make_store(tmp_path, tokens=10, max_directory_bytes=3 * size + 50)
    names = {}
    for start in (100, 200, 300):
        known = set(files_in(tmp_path))
        other = make_snapshot(run_of(10, start))
        store._lower.write(_key(other), other)
        (names[start],) = set(files_in(tmp_path)) - known or {None}
        time.sleep(0.02)
    assert len(files_in(tmp_path)) == 3
    assert store.match(run_of(10, 100), "model").seq_length == 10  # used now
    time.sleep(0.02)
    fourth = make_snapshot(run_of(10, 400))
    store._lower.write(_key(fourth), fourth)
    assert names[100] in files_in(tmp_path)
    assert names[200] not in files_in(tmp_path)
    assert store.stats().tiers[1].bytes <= 3 * size + 50
    large = make_snapshot(run_of(900))
    assert not store._lower.write(_key(large), large)
    store.sanity_check()


def _key(snapshot, namespace=""):
    from hf_prefix_cache.store.entry import Key

    return Key.of(snapshot, namespace)


def test_discarding_a_model_removes_its_files_and_no_others(tmp_path):
    store = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    for fingerprint in ("model", "other"):
        store.insert(make_snapshot(run_of(10), fingerprint=fingerprint))
    store.flush()
    (tmp_path / "notes.safetensors").write_text("mine")
    store.discard("model")
    assert len(files_in(tmp_path)) == 2
    assert store.match(run_of(10), "model") is None
    assert store.match(run_of(10), "other") is not None
    store.clear()
    assert len(files_in(tmp_path)) == 2
    store.clear(directory=True)
    assert files_in(tmp_path) == ["notes.safetensors"]
    store.sanity_check()


def test_a_bad_file_is_set_aside_and_the_store_goes_on(tmp_path):
    store = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    for start in (0, 100, 200, 300, 400):
        store.insert(make_snapshot(run_of(10, start)))
    store.flush()
    by_size = {}
    for path in tmp_path.glob("*.safetensors"):
        from hf_prefix_cache.snapshot_file import read_snapshot_header

        by_size[int(read_snapshot_header(path)[1][0, 0])] = path
    damaged = bytearray(by_size[0].read_bytes())
    damaged[-3] ^= 8
    by_size[0].write_bytes(damaged)  # found when it is loaded
    by_size[100].write_bytes(by_size[100].read_bytes()[:-40])  # found when the directory is read
    os.replace(by_size[200], tmp_path / f"{'0' * 32}.safetensors")  # under another name
    (tmp_path / "elsewhere").mkdir()
    target = tmp_path / "elsewhere" / "file"
    os.replace(by_size[300], target)
    by_size[300].symlink_to(target)
    later = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    for start in (0, 100, 200, 300):
        assert later.match(run_of(10, start), "model") is None
    assert later.match(run_of(10, 400), "model").seq_length == 10
    assert later.stats().damaged_files == 4
    assert len(os.listdir(tmp_path / "set-aside")) == 4
    assert target.exists()
    assert len(files_in(tmp_path)) == 1
    later.insert(make_snapshot(run_of(10)))
    later.flush()
    assert PrefixStore(max_bytes=1_000_000, directory=tmp_path).match(run_of(10), "model") is not None
    later.sanity_check()


def test_a_file_that_another_process_removed_is_a_miss(tmp_path):
    store = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    store.insert(make_snapshot(run_of(10)))
    store.flush()
    later = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    assert later.stats().tiers[1].entries == 1
    directory = later._lower._directory
    found = directory.find([_key(make_snapshot(run_of(10)))], make_tokens(run_of(10)), longer_than=0)
    os.unlink(tmp_path / found.name)
    assert directory.load(found) is None
    assert later.match(run_of(10), "model") is None
    assert later.stats().damaged_files == 0


def make_tokens(tokens):
    from hf_prefix_cache.store.tokens import encode_tokens

    return encode_tokens(torch.tensor(tokens))


def test_what_killed_writers_left_behind_is_removed_by_the_next(tmp_path):
    store = PrefixStore(max_bytes=1_000_000, directory=tmp_path)
    left = tmp_path / f"{'a' * 32}.safetensors.{'b' * 16}.partial"
    left.write_bytes(b"half")
    (tmp_path / "my.partial").write_bytes(b"mine")
    store.insert(make_snapshot(run_of(10)))
    store.flush()
    assert not left.exists()
    assert (tmp_path / "my.partial").exists()


def test_a_directory_that_somebody_removes_is_made_again(tmp_path):
    store = PrefixStore(max_bytes=1_000_000, directory=tmp_path / "prefixes")
    store.insert(make_snapshot(run_of(10)))
    store.flush()
    store.clear()
    shutil.rmtree(tmp_path / "prefixes")
    assert store.match(run_of(10), "model") is None
    store.sanity_check()
    store.insert(make_snapshot(run_of(10)))
    assert store.flush() == 1
    store.clear()
    assert store.match(run_of(10), "model").seq_length == 10


def test_a_disk_that_is_full_stops_nothing(tmp_path, monkeypatch):
    store = make_store(tmp_path)

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    for start in range(0, 200, 50):
        assert store.insert(make_snapshot(run_of(10, start)))
    monkeypatch.undo()
    assert files_in(tmp_path) == []
    assert store.match(run_of(10, 150), "model").seq_length == 10
    store.sanity_check()


@pytest.mark.parametrize("kinds", KINDS)
def test_what_leaves_an_accelerator_goes_to_host_memory_first(kinds, apart, tmp_path):
    store = make_store(tmp_path, max_host_bytes=24 * FULL_TOKEN)
    prompts = [run_of(10, start) for start in range(0, 500, 50)]
    for prompt in prompts:
        store.insert(make_snapshot(prompt, kinds))
        store.sanity_check()
    tiers = {tier.name: tier for tier in store.stats().tiers}
    assert list(tiers) == ["memory", "host", "directory"]
    assert 0 < tiers["host"].bytes <= tiers["host"].max_bytes
    assert tiers["directory"].entries > 0
    for prompt in prompts:
        check_exact(store.match(prompt, "model"), prompt, kinds)
        assert store.match(prompt, "model").seq_length == 10
        store.sanity_check()
    assert tiers["host"].bytes_per_second > 0


def test_host_memory_can_be_left_out(apart):
    store = PrefixStore(max_bytes=12 * FULL_TOKEN, max_host_bytes=0)
    for start in range(0, 200, 50):
        store.insert(make_snapshot(run_of(10, start)))
    assert [tier.name for tier in store.stats().tiers] == ["memory"]


def test_where_the_host_computes_there_is_no_second_host_memory():
    store = PrefixStore(max_bytes=12 * FULL_TOKEN, max_host_bytes=10**6)
    for start in range(0, 200, 50):
        store.insert(make_snapshot(run_of(10, start)))
    assert [tier.name for tier in store.stats().tiers] == ["memory"]


def test_what_is_computed_faster_than_it_is_read_is_not_read(tmp_path):
    store = make_store(tmp_path)
    prompts = [run_of(10, start) for start in range(0, 200, 50)]
    for prompt in prompts:
        store.insert(make_snapshot(prompt))
    store.match(prompts[0], "model")  # tells how fast files are
    with store.measured("model", 64, torch.device("cpu")):
        pass  # as good as no time at all
    assert store.match(prompts[1], "model") is None
    stats = store.stats()
    assert (stats.recomputed, stats.returned) == (1, 1)
    assert stats.seconds_per_token < 1e-4
    with store.measured("slow model", 64, torch.device("cpu")):
        time.sleep(0.5)
    assert store.stats().seconds_per_token > 5e-3
    slow = make_snapshot(run_of(10, 900), fingerprint="slow model")
    store.insert(slow)
    store.flush()
    store.clear()
    assert store.match(run_of(10, 900), "slow model") is not None


def test_a_prefix_asked_for_on_another_device_is_found_on_that_only(tmp_path):
    store = PrefixStore(max_bytes=1_000_000)
    store.insert(make_snapshot(run_of(10)))
    assert store.match(run_of(10), "model", device=torch.device("cpu")) is not None
    assert store.match(run_of(10), "model", device=torch.device("cuda", 0)) is None


def test_budgets_of_places_that_make_no_sense_are_refused(tmp_path):
    for options in (
        {"max_directory_bytes": 5},
        {"directory": tmp_path, "max_directory_bytes": 0},
        {"max_host_bytes": -1},
        {"max_host_bytes": 1.5},
    ):
        with pytest.raises(InvalidBudgetError):
            PrefixStore(max_bytes=1_000, **options)


def test_stats_are_shown_as_a_table(tmp_path, apart):
    from rich.console import Console

    store = make_store(tmp_path, max_host_bytes=24 * FULL_TOKEN)
    for start in range(0, 400, 50):
        store.insert(make_snapshot(run_of(10, start)))
    store.match(run_of(10), "model")
    with store.measured("model", 64, torch.device("cpu")):
        time.sleep(0.01)
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(store.stats())
    shown = console.export_text()
    console.file.close()
    for part in ("1: 1 whole", "host", "directory", "came back", "ms a token", "evicted"):
        assert part in shown


@pytest.mark.parametrize(
    ("kinds", "host"),
    [
        (FULL, False),
        (RUNNING, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((FULL, True), (SLIDING, False), (SLIDING, True))),
    ],
)
def test_a_thousand_random_operations_across_all_places_are_exact_and_consistent(kinds, host, tmp_path, monkeypatch):
    monkeypatch.setattr(lower_tiers, "is_on_accelerator", lambda snapshot: host)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    rng = random.Random(3)
    store = PrefixStore(
        max_bytes=3_000, max_host_bytes=3_000, directory=tmp_path, max_directory_bytes=60_000 + 10_000 * len(kinds)
    )
    inserted, pinned = [], []
    for _ in range(1_000):
        known = [snapshot.input_ids[0].tolist() for snapshot in inserted[-30:]]
        start = list(rng.choice(known)) if known and rng.random() < 0.8 else []
        tokens = start[: rng.randint(0, len(start))][:25] + [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        action = rng.random()
        if action < 0.4:
            snapshot = make_snapshot(tokens, kinds, logits=False, fingerprint=rng.choice(["model", "model", "new"]))
            if store.insert(snapshot):
                inserted.append(snapshot)
        elif action < 0.85:
            found = store.match(tokens, "model")
            possible = [snapshot for snapshot in inserted if snapshot.fingerprint == "model"]
            assert (0 if found is None else found.seq_length) <= longest_exact(possible, tokens)
            if found is not None:
                check_exact(found, tokens, kinds)
        elif action < 0.9:
            store.evict(rng.randrange(1_500))
        elif action < 0.93 and inserted:
            snapshot = rng.choice(inserted)
            if len(pinned) < 2 and store.insert(snapshot):
                store.pin(snapshot)
                pinned.append(snapshot)
            elif pinned:
                store.unpin(pinned.pop())
        elif action < 0.95:
            store.flush()
        elif action < 0.96:
            store.discard("new")
            assert store.match(tokens, "new") is None
        elif action < 0.965:
            store.clear(directory=rng.random() < 0.3)
            pinned.clear()
        store.sanity_check()
    assert store.stats().returned > 20
    assert store.stats().damaged_files == 0


def test_threads_on_two_stores_of_one_directory_get_exact_prefixes_only(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    stores = [PrefixStore(max_bytes=2_000, directory=tmp_path, max_directory_bytes=100_000) for _ in range(2)]
    prompts = [[index % 3] * (index % 5) + [index % 2, *range(index, index + 12)] for index in range(12)]
    failures = []

    def work(seed):
        rng = random.Random(seed)
        store = stores[seed % 2]
        try:
            for _ in range(125):
                index = rng.randrange(len(prompts))
                if rng.random() < 0.4:
                    store.insert(make_snapshot(prompts[index]))
                elif rng.random() < 0.9:
                    found = store.match(prompts[index], "model")
                    if found is not None:
                        check_exact(found, prompts[index])
                else:
                    store.evict(rng.randrange(800))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert sum(store.stats().returned for store in stores) > 5
    assert sum(store.stats().damaged_files for store in stores) == 0
    for store in stores:
        store.sanity_check()


def test_the_index_of_a_directory_finds_what_one_by_one_search_finds():
    from hf_prefix_cache.store.token_index import Indexed, TokenIndex

    rng = random.Random(5)
    for _ in range(200):
        held = [[rng.randrange(3) for _ in range(rng.randint(1, 8))] for _ in range(rng.randint(0, 12))]
        floors = [rng.choice([1, len(tokens)]) for tokens in held]
        index = TokenIndex()
        for place, (tokens, floor) in enumerate(zip(held, floors, strict=True)):
            index.add(Indexed(make_tokens(tokens), str(place), floor))
        asked = [rng.randrange(3) for _ in range(rng.randint(1, 8))]
        known = rng.choice([0, 0, 2])
        usable = [common(tokens, asked) for tokens in held]
        wanted = max([n for n, floor in zip(usable, floors, strict=True) if n >= floor and n > known], default=0)
        found = index.find(make_tokens(asked), longer_than=known)
        assert (0 if found is None else found[1]) == wanted


def test_a_directory_that_changes_in_the_same_moment_is_read_again(tmp_path):
    first, second = (SnapshotDirectory(tmp_path, 10**6) for _ in range(2))
    snapshot = make_snapshot(run_of(10))
    assert len(second) == 0
    assert first.save(_key(snapshot), snapshot)
    assert len(second) == 1
    other = make_snapshot(run_of(10, 50))
    assert first.save(_key(other), other)
    assert len(second) == 2
