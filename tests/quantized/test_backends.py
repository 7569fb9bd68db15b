"""The bitsandbytes formats, and what is said where an option or the package does not fit."""

import sys
import types

import pytest
import torch
from quantized_oracles import FORMATS, name_of, scheme

import hf_prefix_cache as hpc
from hf_prefix_cache.exceptions import MissingPackageError, UnknownOptionError, UnsupportedModelError
from hf_prefix_cache.quantization import bitsandbytes_backend as backend
from hf_prefix_cache.quantization import make_scheme
from tiny_models import TINY_MODELS

bitsandbytes = pytest.importorskip("bitsandbytes")


def make(**options):
    defaults = {"backend": "bitsandbytes", "nbits": 4, "quant_type": None, "group_size": None}
    return make_scheme(**{**defaults, "residual_length": 64, "exact_first": 4, **options})


def decoded(quantizer, groups):
    out = torch.empty_like(groups)
    quantizer.dequantize(quantizer.quantize(groups), out)
    return out


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4_bit_codes_are_those_that_bitsandbytes_itself_chooses(quant_type):
    groups = torch.randn(2, 3, 2, 32, 8)
    blocks = groups.view(-1, 64)
    # A scale that is exact in half precision: bitsandbytes keeps scales in float32.
    blocks[:, 7] = blocks.abs().amax(-1).mul(8).ceil().div(8)
    codes, scales = backend.FourBit(32, quant_type).quantize(groups)
    theirs, state = bitsandbytes.functional.quantize_4bit(groups, blocksize=64, quant_type=quant_type)
    assert torch.equal(scales.float().flatten(), state.absmax)
    assert torch.equal(codes.flatten(), theirs.flatten())
    expected = bitsandbytes.functional.dequantize_4bit(theirs, state)
    assert torch.equal(decoded(backend.FourBit(32, quant_type), groups).flatten(), expected.flatten())


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_4_bits_by_channel_take_the_nearest_level_of_each_channels_range(quant_type):
    groups = torch.randn(1, 2, 3, 32, 5) * torch.tensor([0.01, 1, 3, 10, 0]) + torch.tensor([0, -3, 20, 1, 7])
    levels = bitsandbytes.functional.get_4bit_type(quant_type, device="cpu")
    found = decoded(backend.FourBitByChannel(32, quant_type), groups)
    lowest, highest = groups.amin(-2, keepdim=True), groups.amax(-2, keepdim=True)
    offset = ((lowest + highest) / 2).half().float()
    scale = torch.maximum(highest - offset, offset - lowest).half().float()
    candidates = offset[..., None] + scale[..., None] * levels
    nearest = (groups[..., None] - candidates).abs().amin(-1)
    torch.testing.assert_close((found - groups).abs(), nearest, atol=1e-4, rtol=1e-3)
    assert torch.equal(found[..., 4], torch.full_like(found[..., 4], 7))


def test_8_bits_are_within_half_a_step():
    groups = torch.randn(1, 2, 3, 32, 8)
    steps = groups.view(-1, 64).abs().amax(-1, keepdim=True) / 127
    error = (decoded(backend.EightBit(32), groups) - groups).view(-1, 64).abs()
    assert bool((error <= 0.5 * steps * 1.002).all())


@pytest.mark.parametrize("form", FORMATS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_decoded_does_not_depend_on_what_is_decoded_with_it(form, dtype):
    how = scheme(**form)
    groups = torch.randn(3, 2, 5, 32, 14).to(dtype) + 3
    for quantizer in (how.keys, how.values):
        packed = quantizer.quantize(groups)
        whole = torch.empty_like(groups)
        quantizer.dequantize(packed, whole)
        for row in range(3):
            for start in range(5):
                part = tuple(tensor[row : row + 1, :, start:] for tensor in packed)
                out = torch.empty(1, 2, 32, 5 - start, 14, dtype=dtype).transpose(2, 3)  # strides of any kind
                quantizer.dequantize(part, out)
                assert torch.equal(out, whole[row : row + 1, :, start:])
                alone = quantizer.quantize(groups[row : row + 1, :, start : start + 1])
                assert all(torch.equal(one, tensor[:, :, :1]) for one, tensor in zip(alone, part, strict=True))


def test_hqq_takes_the_nearest_of_levels_at_equal_distance():
    pytest.importorskip("hqq", reason="hqq is not installed: pip install hqq")
    groups = torch.randn(1, 2, 3, 32, 6) * torch.tensor([0.1, 1, 3, 10, 0.5, 2]) + torch.arange(6) * 3
    for nbits in (2, 3, 4, 8):
        how = make(backend="hqq", nbits=nbits, group_size=32)
        keys, values = how.keys, how.values
        for quantizer, ranges, spread in ((keys, groups, -2), (values, groups.view(1, 2, 3, 3, 64), -1)):
            step = (ranges.amax(spread, keepdim=True) - ranges.amin(spread, keepdim=True)) / (2**nbits - 1)
            error = (decoded(quantizer, groups) - groups).abs().view(ranges.shape)
            # Ranges are kept in half precision.
            assert bool((error <= 0.5 * step + 2e-3 * ranges.abs().amax(spread, keepdim=True)).all())


def test_keys_and_values_of_different_bits_are_quantized_in_the_same_groups():
    pytest.importorskip("hqq", reason="hqq is not installed: pip install hqq")
    how = make(backend="hqq", nbits=8, value_nbits=4)
    assert how.keys == make(backend="hqq", nbits=8).keys
    assert how.values == make(backend="hqq", nbits=4, group_size=64).values
    assert how.group_tokens == how.values.group_tokens == 64
    assert make(nbits=4, value_nbits=8, quant_type="fp4").keys == make(quant_type="fp4").keys


def test_zeros_and_huge_values_are_survived():
    for quantizer in (backend.EightBit(32), backend.FourBit(32, "nf4"), backend.FourBitByChannel(32, "nf4")):
        zeros = torch.zeros(1, 1, 1, 32, 4)
        assert torch.equal(decoded(quantizer, zeros), zeros)
        assert bool(decoded(quantizer, torch.full((1, 1, 1, 32, 4), 1e30)).isfinite().all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "gptq"}, "backend is 'gptq'; the backends are 'bitsandbytes', 'hqq'"),
        ({"backend": "quanto"}, "'quanto', which Transformers' QuantizedCache has"),
        ({"backend": "fp8"}, "'fp8', which Transformers' QuantizedCache has"),
        ({"nbits": 3}, "nbits is 3, but the backend 'bitsandbytes' has 4 and 8 bits"),
        ({"backend": "hqq", "nbits": 5}, "nbits is 5, but the backend 'hqq' has 2, 3, 4, 8 bits"),
        ({"backend": "hqq", "quant_type": "nf4"}, "quant_type is 'nf4', which belongs to the backend 'bitsandbytes'"),
        ({"backend": "hqq", "group_size": 0}, "group_size is 0"),
        ({"nbits": "4"}, "nbits is '4'"),
        ({"nbits": 8, "quant_type": "nf4"}, "quant_type is 'nf4', which belongs to 4 bits"),
        ({"quant_type": "int4"}, "quant_type is 'int4'"),
        ({"value_nbits": 3}, "nbits is 3, but the backend 'bitsandbytes' has 4 and 8 bits"),
        ({"nbits": 8, "value_nbits": 8, "quant_type": "nf4"}, "quant_type is 'nf4', which belongs to 4 bits"),
        ({"exact_layers": [2]}, r"exact_layers is \[2\]; it is a list of numbers of the 2 layers"),
        ({"exact_layers": "0"}, "exact_layers is '0'"),
        ({"exact_layers": 0}, "exact_layers is 0"),
        ({"exact_layers": [True]}, "exact_layers is"),
        ({"exact_layers": [0, -1]}, "exact_layers names every layer"),
        ({"group_size": 48}, "group_size is 48"),
        ({"residual_length": -1}, "residual_length is -1"),
        ({"residual_length": 1.5}, "residual_length is 1.5"),
        ({"exact_first": True}, "exact_first is True"),
    ],
)
def test_options_that_do_not_exist_are_refused_by_name(options, message):
    with pytest.raises(UnknownOptionError, match=message):
        hpc.PrefixQuantizedCache(config=TINY_MODELS["llama"]().config, **options)


def test_a_size_of_heads_that_does_not_fill_blocks_is_refused_before_anything_is_held():
    how = make(nbits=8)
    with pytest.raises(UnsupportedModelError, match="heads of size 3"):
        how.check(torch.zeros(1, 3), torch.zeros(1, 3))


@pytest.mark.parametrize("package", ["bitsandbytes", "hqq"])
def test_a_missing_package_is_named_with_its_install_command(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=f"pip install {package}"):
        make(backend=package)


def test_a_release_that_decodes_otherwise_is_noticed_when_a_cache_is_made(monkeypatch):
    real = bitsandbytes.functional

    def swapped(codes, state):
        return real.dequantize_4bit(codes << 4 | codes >> 4, state)

    for broken in (swapped, None):
        functional = types.SimpleNamespace(
            QuantState=real.QuantState, get_4bit_type=real.get_4bit_type, dequantize_4bit=broken
        )
        package = types.SimpleNamespace(functional=functional, __version__=f"9.{broken is None}")
        monkeypatch.setitem(sys.modules, "bitsandbytes", package)
        with pytest.raises(MissingPackageError, match="does not decode what this version"):
            make()
