"""The parameters of each kernel are the fields of what its launch passes, then its constants."""

from __future__ import annotations

import inspect

import pytest
from attn_common import has_gluon
from blocksparse_attn._kernels import list_structures as ls
from blocksparse_attn._kernels import structures as s
from blocksparse_attn._kernels.attention import _attention_kernel
from blocksparse_attn._kernels.backward_rows import row_kernel
from blocksparse_attn._kernels.lists import _bit_kernel, _list_kernel
from blocksparse_attn._kernels.pairs import _pair_kernel

pytestmark = pytest.mark.eager

PORTABLE = [
    (_attention_kernel, (s.Tensors, s.Numbers)),
    (row_kernel, (s.RowTensors, s.RowNumbers)),
    (_bit_kernel, (ls.BitTensors, ls.BitNumbers)),
    (_list_kernel, (ls.ListTensors, ls.ListNumbers)),
    (_pair_kernel, (ls.PairTensors, ls.PairNumbers)),
]


def assert_parameters(kernel, structures):
    """Hold the names of a kernel's parameters, compiled or interpreted, to those of fields."""
    names = [name for structure in structures for name in structure._fields]
    assert list(inspect.signature(kernel.fn).parameters) == [*names, "OPTIONS"]


@pytest.mark.parametrize(
    ("kernel", "structures"), PORTABLE, ids=[kernel.fn.__name__ for kernel, _ in PORTABLE]
)
def test_portable(kernel, structures):
    assert_parameters(kernel, structures)


@pytest.mark.skipif(not has_gluon(), reason="Triton without Gluon")
def test_hopper():
    from blocksparse_attn._kernels.hopper import structures as h
    from blocksparse_attn._kernels.hopper.backward import hopper_backward_kernel
    from blocksparse_attn._kernels.hopper.queries import hopper_query_kernel

    for kernel, structures in (
        (hopper_query_kernel, (h.QueryTensors, h.QueryNumbers)),
        (hopper_backward_kernel, (h.BackwardTensors, h.BackwardNumbers)),
    ):
        assert_parameters(kernel, structures)
