"""Several processes on one directory, and writers that are killed at any moment: nothing is lost or unreadable."""

import multiprocessing
import os
import random
import sys
import time
from pathlib import Path
from threading import Thread

import pytest
from store_prefixes import make_snapshot
from writers import PROMPTS, write_and_read, write_for_ever

import hf_prefix_cache as hpc
from hf_prefix_cache.store import PrefixStore
from hf_prefix_cache.store.directory import SnapshotDirectory
from hf_prefix_cache.store.entry import Key

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


@pytest.fixture(scope="module")
def processes():
    """A server that has imported everything and starts a process in milliseconds."""
    context = multiprocessing.get_context("forkserver")
    # What is on this process's path only cannot be imported by the server of old Pythons.
    context.set_forkserver_preload(["hf_prefix_cache", "writers"])
    before = sys.path[:]
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    yield context
    sys.path[:] = before


def kill_writers(processes, folder, times):
    """Kill a writer ``times`` times, at random moments; look after each at all that was ever whole."""
    rng = random.Random(0)
    (folder / "store").mkdir()
    known: set[str] = set()
    make_snapshot(PROMPTS[0], logits=True).save(folder / "single.safetensors")
    for round_number in range(times):
        writer = processes.Process(target=write_for_ever, args=(str(folder), round_number), daemon=True)
        writer.start()
        deadline = time.monotonic() + 20
        while len(list((folder / "store").glob("*.safetensors"))) == len(known) and time.monotonic() < deadline:
            time.sleep(0.001)  # until it writes: a process takes a while to begin
        time.sleep(rng.random() * 0.05)
        writer.kill()
        writer.join()
        there = {path.name for path in (folder / "store").glob("*.safetensors")}
        assert known <= there
        for name in there - known:
            snapshot = hpc.PrefixSnapshot.load(folder / "store" / name, model=None, unverified=True)
            assert snapshot.input_ids[0].tolist() in PROMPTS
        known = there
        single = hpc.PrefixSnapshot.load(folder / "single.safetensors", model=None, unverified=True)
        assert single.input_ids[0].tolist() in PROMPTS[:2]
    store = PrefixStore(max_bytes=10**6, directory=folder / "store", max_directory_bytes=10**9)
    assert store.stats().tiers[1].entries == len(known) >= times
    store.sanity_check()
    store.insert(make_snapshot(PROMPTS[0], fingerprint="after"))
    assert store.flush() == 1
    assert not list((folder / "store").glob("*.partial"))
    assert not (folder / "store" / "set-aside").exists()


def test_writers_that_are_killed_lose_nothing_that_was_there(processes, tmp_path):
    kill_writers(processes, tmp_path, times=4)


@pytest.mark.slow
def test_a_hundred_writers_that_are_killed_lose_nothing_that_was_there(processes, tmp_path):
    kill_writers(processes, tmp_path, times=100)


def test_three_processes_share_a_directory(processes, tmp_path):
    running = [processes.Process(target=write_and_read, args=(str(tmp_path), seed, 15)) for seed in range(3)]
    for process in running:
        process.start()
    for process in running:
        process.join(60)
    assert [process.exitcode for process in running] == [0, 0, 0]
    store = PrefixStore(max_bytes=10**6, directory=tmp_path, max_directory_bytes=100_000)
    store.sanity_check()
    assert 0 < store.stats().tiers[1].bytes <= 100_000


def test_a_check_is_not_confused_by_what_others_write_meanwhile(tmp_path, monkeypatch):
    store, other = (SnapshotDirectory(tmp_path, max_bytes=100_000) for _ in range(2))
    key, read, writers = Key("model", "", None), SnapshotDirectory._read, []
    store.save(key, make_snapshot(PROMPTS[0]))

    def read_and_let_another_write(directory):
        read(directory)
        if not writers:
            writers.append(Thread(target=other.save, args=(key, make_snapshot(PROMPTS[1]))))
            writers[0].start()
            writers[0].join(0.5)

    monkeypatch.setattr(SnapshotDirectory, "_read", read_and_let_another_write)
    store.check()
    writers[0].join()
    store.check()
    assert len(list(store._names())) == 2
