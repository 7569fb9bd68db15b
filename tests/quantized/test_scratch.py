"""Memory that layers decode into is used again, and never while somebody still looks at it."""

import pytest
import torch
from quantized_oracles import new_cache, run

from hf_prefix_cache.layers.scratch import Scratch
from tiny_models import TINY_MODELS

CPU = torch.device("cpu")


def take(scratch, tokens=4, dtype=torch.float32):
    return scratch.take((1, 2, tokens, 3), (1, 2, tokens, 5), device=CPU, dtype=dtype)


def test_memory_that_nobody_holds_is_used_again():
    scratch = Scratch()
    place = take(scratch).keys.data_ptr()
    assert take(scratch).keys.data_ptr() == place
    assert take(scratch, 2).keys.data_ptr() == place


def test_keys_and_values_do_not_overlap():
    keys, values = take(Scratch())
    keys.fill_(1)
    values.fill_(2)
    assert bool((keys == 1).all())
    assert (keys.shape, values.shape) == ((1, 2, 4, 3), (1, 2, 4, 5))


@pytest.mark.parametrize("keep", [lambda part: part, lambda part: part[:, :1].transpose(1, 2), lambda part: part.T])
@pytest.mark.filterwarnings("ignore:The use of `x.T`")
def test_memory_that_is_still_looked_at_is_left_alone(keep):
    scratch = Scratch()
    held = keep(take(scratch).values.fill_(7))
    take(scratch).values.fill_(8)
    assert bool((held == 7).all())


def test_what_autograd_saves_is_left_alone():
    scratch = Scratch()
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * take(scratch).keys.fill_(2)).sum()
    take(scratch).keys.fill_(3)
    loss.backward()
    assert weight.grad.item() == 2 * 24


def test_inference_mode_and_normal_mode_do_not_share_memory():
    scratch = Scratch()
    with torch.inference_mode():
        place = take(scratch).keys.data_ptr()
    held = take(scratch)
    held.keys.fill_(1)  # would raise on a tensor made in inference mode
    assert held.keys.data_ptr() != place or not held.keys.is_inference()


def test_released_memory_is_freed_and_buffers_differ_by_dtype():
    scratch = Scratch()
    half = take(scratch, dtype=torch.float16)
    assert half.keys.dtype == torch.float16
    take(scratch)
    scratch.release()
    assert not scratch._buffers


def test_layers_use_one_buffer_and_nothing_is_kept_after_a_forward():
    model = TINY_MODELS["llama"]()
    cache = new_cache(model, residual_length=0)
    places = []
    for layer in cache.layers:
        update = layer.update

        def spy(*args, _update=update, **kwargs):
            keys, values = _update(*args, **kwargs)
            places.append(keys.data_ptr())
            return keys, values

        layer.update = spy
    with torch.no_grad():
        run(model, torch.randint(1, 99, (1, 100)), cache)
        places.clear()
        run(model, torch.randint(1, 99, (1, 1)), cache)
    assert len(places) == 2
    assert len(set(places)) == 1
    assert not cache._scratch._buffers


def test_a_model_that_keeps_what_a_layer_attended_to_is_not_overwritten():
    model = TINY_MODELS["llama"]()
    cache = new_cache(model, residual_length=0)
    kept = []
    for layer in cache.layers:
        update = layer.update

        def keep(*args, _update=update, **kwargs):
            result = _update(*args, **kwargs)
            kept.append((result, [part.clone() for part in result]))
            return result

        layer.update = keep
    with torch.no_grad():
        for tokens in (100, 1, 1):
            run(model, torch.randint(1, 99, (1, tokens)), cache)
    for shown, then in kept:
        assert all(torch.equal(part, copy) for part, copy in zip(shown, then, strict=True))
