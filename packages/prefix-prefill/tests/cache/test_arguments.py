"""What the launches of writes, appends and latent attention pass to their kernels."""

from __future__ import annotations

import pytest
from prefix_prefill._cache.kernels import arguments as write
from prefix_prefill._kvcache.kernels import arguments as append
from prefix_prefill._mla.call import MlaTensors, MlaWriteTensors
from prefix_prefill._mla.hopper import arguments as hopper_mla
from prefix_prefill._mla.portable import arguments as mla
from prefix_prefill._paged.call import AppendTensors, WriteTensors

pytestmark = pytest.mark.eager


def test_the_tensors_of_a_call_are_in_the_order_of_the_kernel():
    """Plans pass them on as they are."""
    for given, taken in (
        (WriteTensors, write.Tensors),
        (AppendTensors, append.Tensors),
        (MlaWriteTensors, mla.WriteTensors),
    ):
        assert [f"{name}_ptr" for name in given._fields] == [*taken._fields]
    ordered = *(f"{name}_ptr" for name in MlaTensors._fields), "part_out_ptr", "part_lse_ptr"
    assert ordered == mla.Tensors._fields


def test_what_a_kernel_is_compiled_with_is_in_upper_case():
    for module in (write, append, mla, hopper_mla):
        for structure in vars(module).values():
            fields = getattr(structure, "_fields", ())
            assert len({name.isupper() for name in fields}) <= 1, structure
