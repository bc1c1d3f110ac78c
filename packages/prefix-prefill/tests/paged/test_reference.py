"""The definition against PyTorch's own attention, and against itself laid out otherwise."""

from __future__ import annotations

import math

import pytest
import torch
from prefix_prefill import paged_attention_reference
from torch.nn.functional import scaled_dot_product_attention

from .._numerics import MEDIUM, PACKED, Problem, make_case
from ._reference import bias_of, rows_of

pytestmark = pytest.mark.eager
CPU = torch.device("cpu")


@pytest.mark.parametrize("layout", ["nhd", PACKED])
@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    "feature", [(), ("full",), ("window",), ("window_both",), ("alibi",), ("alibi_batch",)], ids=str
)
def test_agrees_with_torch(feature, dense, layout):
    problem = MEDIUM._replace(dense=dense, layout=layout)
    case = make_case(problem, torch.float64, CPU, feature)
    out, lse = paged_attention_reference(**case.inputs, **case.options, return_lse=True)
    for b, (queries, keys) in enumerate(problem.lengths):
        q, k, v, rows = rows_of(case, problem, b)
        bias = bias_of(case, queries, keys, 4, b)
        want = scaled_dot_product_attention(q[None], k[None], v[None], bias[None], enable_gqa=True)
        torch.testing.assert_close(out[rows].transpose(0, 1), want[0], rtol=1e-12, atol=1e-12)
        scores = q @ k.repeat_interleave(2, 0).transpose(1, 2) / 4 + bias
        torch.testing.assert_close(lse[:, rows], scores.logsumexp(-1), rtol=1e-12, atol=1e-12)


def test_softcap_and_sinks():
    case = make_case(MEDIUM, torch.float64, CPU, ("softcap", "sinks"))
    out, lse = paged_attention_reference(**case.inputs, **case.options, return_lse=True)
    for b, (queries, keys) in enumerate(MEDIUM.lengths):
        q, k, v, rows = rows_of(case, MEDIUM, b)
        k, v = k.repeat_interleave(2, 0), v.repeat_interleave(2, 0)
        scores = 1.5 * torch.tanh(q @ k.transpose(1, 2) / 4 / 1.5)
        scores = scores + bias_of(case, queries, keys, 4, b)
        sinks = case.inputs["sinks"].double()[:, None, None].expand(-1, queries, 1)
        p = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        torch.testing.assert_close(out[rows].transpose(0, 1), p @ v, rtol=1e-12, atol=1e-12)
        want = torch.cat([scores, sinks], -1).logsumexp(-1)
        torch.testing.assert_close(lse[:, rows], want, rtol=1e-12, atol=1e-12)


def test_an_odd_head_dim_and_other_float_dtypes_are_defined():
    problem = Problem(((3, 9),), 2, 1, 8, page=4)
    case = make_case(problem, torch.float64, CPU)
    narrow = {name: t[..., :5] for name, t in case.inputs.items()}
    assert paged_attention_reference(**narrow, **case.options).shape == (3, 2, 5)


@pytest.mark.parametrize("lengths", [((3, 0), (2, 1)), ((5, 2),)])
@pytest.mark.parametrize("sinks", [False, True])
def test_rows_without_a_key(sinks, lengths):
    problem = Problem(lengths, 2, 1, 16)
    case = make_case(problem, torch.float64, CPU, ("sinks",) if sinks else ())
    out, lse = paged_attention_reference(**case.inputs, **case.options, return_lse=True)
    blind = [i + k - q < 0 for q, k in lengths for i in range(q)]
    assert not out[blind].any()
    want = case.inputs["sinks"].double() if sinks else torch.full((2,), -math.inf).double()
    assert torch.equal(lse[:, blind], want[:, None].expand(-1, sum(blind)))


def test_out_is_filled():
    case = make_case(MEDIUM, torch.float32, CPU)
    out = torch.empty_like(case.inputs["q"])
    got = paged_attention_reference(**case.inputs, **case.options, out=out)
    assert got is out
    assert torch.equal(out, paged_attention_reference(**case.inputs, **case.options))
