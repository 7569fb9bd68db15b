"""A few values of many tensors, read at their addresses or through views."""

import gc
import weakref

import numpy as np
import pytest
import torch

from hf_prefix_cache.samples import Samples


def tensors_of_every_kind():
    return [
        torch.arange(1000, dtype=torch.float32),
        torch.arange(7, dtype=torch.bfloat16),
        torch.arange(40, dtype=torch.int8),
        torch.rand(3, 5, dtype=torch.float64),
        torch.rand(6, 4).T,
        torch.rand(1, 3).expand(5, 3),
        torch.rand(4, dtype=torch.complex128),
        torch.tensor([False, False, True]),
        torch.tensor([]),
        torch.empty(3, device="meta"),
        torch.tensor(float("nan")),
    ]


def test_nothing_has_changed_where_nothing_was_written():
    tensors = tensors_of_every_kind()
    samples = Samples(tensors, set())
    assert all(map(np.array_equal, samples.read(tensors), samples.read(tensors)))


@pytest.mark.parametrize("place", [0, 1, 2, 3, 4, 5, 6, 7, 10])
def test_writing_the_first_value_of_a_tensor_shows_in_its_values_alone(place):
    tensors = tensors_of_every_kind()
    samples = Samples(tensors, set())
    before = samples.by_tensor(samples.read(tensors))
    tensors[place][tuple(0 for _ in tensors[place].shape)] = 9
    after = samples.by_tensor(samples.read(tensors))
    assert before.keys() == after.keys() == {0, 1, 2, 3, 4, 5, 6, 7, 10}
    assert [index for index in before if not np.array_equal(before[index], after[index])] == [place]


def test_all_values_of_a_small_tensor_are_seen_where_it_is_looked_at_closely():
    tensor = torch.zeros(100)
    samples = Samples([tensor], {id(tensor)})
    before = samples.read([tensor])
    tensor[57] = 1
    assert not np.array_equal(samples.read([tensor])[0], before[0])


def test_no_tensor_is_held():
    tensor = torch.ones(10)
    samples = Samples([tensor], set())
    gone = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert gone() is None
    assert samples
