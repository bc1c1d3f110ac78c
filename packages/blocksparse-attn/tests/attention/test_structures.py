"""The parameters of each kernel are the fields of what its launch passes, then its constants."""

from __future__ import annotations

import inspect

import pytest
from attn_common import has_gluon
from blocksparse_attn._attention.portable import structures as s
from blocksparse_attn._attention.portable.attention import attention_kernel
from blocksparse_attn._attention.portable.backward_rows import row_kernel
from blocksparse_attn._layout.kernels import structures as ls
from blocksparse_attn._layout.kernels.lists import bit_kernel, list_kernel
from blocksparse_attn._layout.kernels.pairs import pair_kernel

pytestmark = pytest.mark.eager

PORTABLE = [
    (attention_kernel, (s.Tensors, s.Numbers)),
    (row_kernel, (s.RowTensors, s.RowNumbers)),
    (bit_kernel, (ls.BitTensors, ls.BitNumbers)),
    (list_kernel, (ls.ListTensors, ls.ListNumbers)),
    (pair_kernel, (ls.PairTensors, ls.PairNumbers)),
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
    from blocksparse_attn._attention.hopper import structures as h
    from blocksparse_attn._attention.hopper.backward.kernel import hopper_backward_kernel
    from blocksparse_attn._attention.hopper.queries.kernel import hopper_query_kernel

    for kernel, structures in (
        (hopper_query_kernel, (h.QueryTensors, h.QueryNumbers)),
        (hopper_backward_kernel, (h.BackwardTensors, h.BackwardNumbers)),
    ):
        assert_parameters(kernel, structures)
