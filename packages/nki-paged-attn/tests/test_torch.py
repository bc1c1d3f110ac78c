"""PyTorch tensors in every place where arrays may be, of every kind, and the same kind back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from nki_paged_attn import paged_attention
from nki_paged_attn.sim import isa, language, simulate

from ._cases import make_case

torch = pytest.importorskip("torch")
SINKS = np.linspace(-1, 1, 4).astype(np.float32)


def tensors_of(case):
    return [torch.as_tensor(x) for x in case.tensors]


def test_tensors_come_back_as_tensors():
    case = make_case([5, 1], [20, 30])
    out, lse = paged_attention(*tensors_of(case), return_lse=True, backend="sim")
    expected, expected_lse = case.run()
    np.testing.assert_array_equal(out.numpy(), expected)
    np.testing.assert_array_equal(lse.numpy(), expected_lse)


def test_bf16_and_fp8_tensors():
    case = make_case([5, 1], [20, 30])
    arguments = tensors_of(case)
    arguments[:3] = [x.bfloat16() for x in arguments[:3]]
    arguments[3] = arguments[3].to(torch.float8_e4m3fn)
    out = paged_attention(*arguments, backend="sim")
    assert out.dtype == torch.bfloat16
    # the same numbers, as arrays in the dtypes of ml_dtypes
    arrays = list(case.tensors)
    arrays[:3] = [x.float().numpy().astype(ml_dtypes.bfloat16) for x in arguments[:3]]
    arrays[3] = arguments[3].float().numpy().astype(ml_dtypes.float8_e4m3fn)
    expected = paged_attention(*arrays, backend="sim")
    np.testing.assert_array_equal(out.float().numpy(), expected.astype(np.float32))


@pytest.mark.parametrize("kind", ["parameter", "bfloat16"])
def test_options_may_be_parameters_and_of_bf16(kind):
    case = make_case([5, 1], [20, 30])

    def given(x):
        found = torch.tensor(x)
        return torch.nn.Parameter(found) if kind == "parameter" else found.bfloat16()

    values = {"sinks": [0.5, -1.0, 2.0, 0.0], "k_scale": [0.5, 2.0], "v_scale": [1.5]}
    options = {name: given(x) for name, x in values.items()}
    out = paged_attention(*case.tensors, backend="sim", **options)
    arrays = {name: np.array(x) for name, x in values.items()}
    np.testing.assert_array_equal(out, case.run(**arrays)[0])


def test_queries_may_be_parameters():
    case = make_case([5, 1], [20, 30])
    q = torch.nn.Parameter(torch.from_numpy(case.q))
    out = paged_attention(q, *case.tensors[1:], backend="sim")
    np.testing.assert_array_equal(out.numpy(), case.run()[0])


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int32"])
def test_kernels_take_tensors_and_give_them(name):
    """As with ``nki.simulate``: what the kernel writes into changes in place."""

    def copy(x, y):
        tile = language.ndarray(x.shape, dtype=x.dtype, buffer=language.sbuf)
        out = language.ndarray(x.shape, dtype=x.dtype, buffer=language.shared_hbm)
        isa.dma_copy(dst=tile, src=x)
        isa.dma_copy(dst=out, src=tile)
        isa.dma_copy(dst=y, src=tile)
        return out

    x = torch.arange(8).reshape(2, 4).to(getattr(torch, name))
    y = torch.zeros_like(x)
    got = simulate(copy)(x, y)
    assert got.dtype == x.dtype
    assert torch.equal(got.float(), x.float())
    assert torch.equal(y.float(), x.float())
