"""The slow, obvious form of a quantized layer: every row a list of tokens, each decoded from then on."""

import importlib.util

import pytest
import torch

import hf_prefix_cache as hpc
from hf_prefix_cache.compat import cache_argument
from hf_prefix_cache.layers.quantized import PrefixQuantizedLayer, PrefixQuantizedSlidingWindowLayer
from hf_prefix_cache.layers.scratch import Scratch
from hf_prefix_cache.quantization import make_scheme

pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: pip install bitsandbytes")

FORMATS = [{"nbits": 8}, {"nbits": 4, "quant_type": "nf4"}, {"nbits": 4, "quant_type": "fp4"}]
FORMATS += [{"nbits": 8, "value_nbits": 4}]
if importlib.util.find_spec("hqq"):
    FORMATS += [{"backend": "hqq", "nbits": nbits} for nbits in (2, 3, 4, 8)]
    FORMATS += [{"backend": "hqq", "nbits": 4, "value_nbits": 2}]
HEADS, KEY_DIM, VALUE_DIM = 2, 6, 4  # sizes of heads may differ, as in latent attention


def name_of(form):
    """A short name of a format, for the ids of tests."""
    values = f"_{form['value_nbits']}bit_values" if "value_nbits" in form else ""
    return form.get("quant_type") or f"{form.get('backend', '')}{form['nbits']}bit{values}"


def scheme(*, nbits=4, value_nbits=None, quant_type=None, backend="bitsandbytes", residual_length=5, exact_first=3):
    return make_scheme(
        backend=backend,
        nbits=nbits,
        value_nbits=value_nbits,
        quant_type=quant_type,
        group_size=32,
        residual_length=residual_length,
        exact_first=exact_first,
    )


def new_layer(how, window=None, **options):
    if window is None:
        return PrefixQuantizedLayer(how, Scratch(), **options)
    return PrefixQuantizedSlidingWindowLayer(window, how, Scratch(), **options)


def random_tokens(rows, tokens, dtype=torch.float32):
    """Keys with channels of different size and offset, as in real models, and values."""
    keys = torch.randn(rows, HEADS, tokens, KEY_DIM) * torch.linspace(0.1, 3, KEY_DIM)
    keys = keys + torch.linspace(-5, 5, KEY_DIM)
    return keys.to(dtype), torch.randn(rows, HEADS, tokens, VALUE_DIM).to(dtype)


class OracleLayer:
    """Tokens of each row, exact until their group is complete, then what the quantizer makes of the group."""

    def __init__(self, how, window=None):
        self.how, self.window = how, window
        self.rows, self.length = [], 0

    def fork(self):
        other = OracleLayer(self.how, self.window)
        other.rows, other.length = [list(row) for row in self.rows], self.length
        return other

    def update(self, keys, values):
        """Return what the new tokens attend to, then quantize what is due."""
        if not self.length:
            self.rows = [[] for _ in keys]
        new = keys.shape[-2]
        for row, row_keys, row_values in zip(self.rows, keys, values, strict=True):
            row.extend((row_keys[:, i], row_values[:, i], False) for i in range(new))
        visible = len(self.rows[0]) if self.window is None else min(self.length, self.window - 1) + new
        result = self.read(visible)
        self.length += new
        for row in self.rows:
            if self.window is not None:
                del row[: -self.window]
            self._quantize(row)
        return result

    def read(self, tokens=None):
        tokens = len(self.rows[0]) if tokens is None else tokens
        shown = [row[len(row) - tokens :] for row in self.rows]
        return tuple(
            torch.stack([torch.stack([token[side] for token in row], dim=1) for row in shown]) for side in (0, 1)
        )

    def crop_to(self, length):
        for row in self.rows:
            del row[len(row) - (self.length - length) :]
        self.length = length

    def select(self, rows):
        self.rows = [list(self.rows[row]) for row in rows]

    def _quantize(self, row):
        last = max((i for i, token in enumerate(row) if token[2]), default=-1)
        start, first = last + 1, self.length - len(row)
        start += max(0, self.how.exact_first - (first + start))
        size = self.how.group_tokens
        while len(row) - start > self.how.residual_length and len(row) - start >= size:
            decoded = []
            for side, quantizer in enumerate((self.how.keys, self.how.values)):
                group = torch.stack([token[side] for token in row[start : start + size]], dim=1)[None, :, None]
                out = torch.empty_like(group)
                quantizer.dequantize(quantizer.quantize(group), out)
                decoded.append(out[0, :, 0].unbind(1))
            row[start : start + size] = [(key, value, True) for key, value in zip(*decoded, strict=True)]
            start += size


def assert_equal(layer, oracle):
    """The layer holds what the oracle holds, bit for bit."""
    for held, expected in zip((layer.keys, layer.values), oracle.read(), strict=True):
        torch.testing.assert_close(held, expected, atol=0, rtol=0)
    assert layer.seen() == oracle.length


def new_cache(model, **options):
    return hpc.PrefixQuantizedCache(config=model.config, **options)


def run(model, input_ids, cache, **kwargs):
    """Logits of a raw forward call on a cache."""
    return model(input_ids=input_ids, **kwargs, **cache_argument(cache)).logits
