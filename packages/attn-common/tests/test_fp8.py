"""The constants against all 256 codes of each format, decoded here and decoded by torch."""

import itertools
import math
import re

import pytest
import torch
from attn_common import Platform, fp8_dtype, fp8_info

NAMES = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"]
# exponent bits, mantissa bits, bias: from the formats' definitions, not from the package
LAYOUT = {
    "float8_e4m3fn": (4, 3, 7),
    "float8_e4m3fnuz": (4, 3, 8),
    "float8_e5m2": (5, 2, 15),
    "float8_e5m2fnuz": (5, 2, 16),
}


def decode(name, code):
    """Return the value of a code by the rules of its format."""
    exponent_bits, mantissa_bits, bias = LAYOUT[name]
    sign = -1.0 if code & 0x80 else 1.0
    exponent = (code >> mantissa_bits) & (2**exponent_bits - 1)
    mantissa = code & (2**mantissa_bits - 1)
    if name.endswith("fnuz"):
        if code == 0x80:  # what would be minus zero is the only NaN
            return math.nan
    elif exponent == 2**exponent_bits - 1:
        if name == "float8_e5m2":  # as in IEEE 754
            return math.nan if mantissa else sign * math.inf
        if mantissa == 2**mantissa_bits - 1:  # e4m3fn gives up one mantissa only
            return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture
def values(name):
    return [decode(name, code) for code in range(256)]


def test_torch_decodes_the_256_codes_alike(name, values):
    theirs = torch.arange(256, dtype=torch.uint8).view(getattr(torch, name)).double()
    ours = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(ours.isnan(), theirs.isnan())
    # as bits, so that the sign of zero counts
    kept = ~ours.isnan()
    assert torch.equal(ours[kept].view(torch.int64), theirs[kept].view(torch.int64))


def test_range_is_that_of_the_256_codes(name, values):
    info = fp8_info(name)
    finite = [v for v in values if math.isfinite(v)]
    assert info.max == max(finite)
    assert info.min == min(finite)
    assert info.smallest_subnormal == min(v for v in finite if v > 0)
    assert info.has_inf == any(math.isinf(v) for v in values)


def test_bits_are_those_of_the_format(name):
    info = fp8_info(name)
    assert info.name == name
    assert (info.exponent_bits, info.mantissa_bits, info.bias) == LAYOUT[name]
    assert 1 + info.exponent_bits + info.mantissa_bits == info.bits == 8


def test_smallest_normal_is_where_the_spacing_begins_to_grow(name, values):
    info = fp8_info(name)
    positive = sorted(v for v in values if v > 0 and math.isfinite(v))
    spacing = {a: b - a for a, b in itertools.pairwise(positive)}
    below = [s for v, s in spacing.items() if v < 2 * info.smallest_normal]
    assert set(below) == {info.smallest_subnormal}
    assert spacing[2 * info.smallest_normal] == 2 * info.smallest_subnormal
    # and it is the first code whose exponent field is not zero
    assert decode(name, 1 << LAYOUT[name][1]) == info.smallest_normal


def test_a_torch_dtype_and_its_name_are_the_same_question(name):
    assert fp8_info(getattr(torch, name)) is fp8_info(name)


@pytest.mark.parametrize("dtype", [torch.float16, "float8", "float8_e8m0fnu", None])
def test_other_dtypes_are_refused_by_name(dtype):
    message = f"fp8_info: dtype must be one of {', '.join(NAMES)}, got {dtype}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        fp8_info(dtype)


@pytest.mark.parametrize("platform", ["amd:gfx940", "amd:gfx941", "amd:gfx942"])
def test_cdna3_encodes_in_fnuz(platform):
    assert fp8_dtype(Platform.parse(platform)) == "float8_e4m3fnuz"


@pytest.mark.parametrize(
    "platform",
    ["cpu", "nvidia:sm_80", "nvidia:sm_90", "nvidia:sm_120", "amd:gfx90a", "amd:gfx950"]
    + ["amd:gfx1100", "amd:gfx1201", "neuron:trn2"],
)
def test_everything_else_encodes_in_fn(platform):
    assert fp8_dtype(Platform.parse(platform)) == "float8_e4m3fn"
