"""The surface of nki: every name of AWS's stubs is there, or refuses its use by name."""

from __future__ import annotations

import importlib
import sys

import pytest
from nki_paged_attn.sim import NotModelledError, load
from nki_paged_attn.sim.errors import Missing
from nki_paged_attn.sim.loader import MODULES

# public names of the stubs of SDK 2.32 (NKI 0.6)
STUBS = {
    "nki": """
        jit simulate
    """,
    "nki.isa": """
        NkiInstruction NkiValidationError VirtualRegister activate2 activation activation_reduce
        affine_select bn_aggr bn_stats core_barrier dge_mode dma_compute dma_copy dma_engine
        dma_transpose dropout engine exponential get_nc_sub_version get_nc_version gpsimd_engine
        iota local_gather matmul_perf_mode max8 memset nc_find_index8 nc_match_replace8
        nc_matmul nc_matmul_mx nc_n_gather nc_stream_shuffle nc_transpose nc_version
        nonzero_with_count oob_mode quantize_mx rand2 rand_get_state rand_set_state range_select
        reciprocal reduce_cmd register_alloc register_load register_move register_store rng
        scalar_engine scalar_tensor_tensor select_reduce sendrecv sequence_bounds set_rng_seed
        tensor_copy tensor_copy_predicated tensor_engine tensor_partition_reduce tensor_reduce
        tensor_scalar tensor_scalar_cumulative tensor_scalar_reduce tensor_tensor
        tensor_tensor_scan topk unknown_engine vector_engine
    """,
    "nki.language": """
        DType MemoryRegion NKIObject NkiTensor abs abs_max abs_min add affine_range all arctan
        average bfloat16 bitwise_and bitwise_or bitwise_xor bool_ broadcast_to bypass ceil copy
        cos device_print divide dropout ds dynamic_range empty_like equal erf erf_dx exp
        expand_dims float16 float32 float4_e2m1fn_x4 float8_e4m3 float8_e4m3fn float8_e4m3fn_x4
        float8_e5m2 float8_e5m2_x4 float8_e8m0fnu floor fmod fori_loop full gather_flattened
        gelu gelu_apprx_sigmoid gelu_apprx_sigmoid_dx gelu_apprx_tanh gelu_dx greater
        greater_equal hbm int16 int32 int8 invert is_hbm is_on_chip is_psum is_sbuf left_shift
        less less_equal load load_transpose2d log logical_and logical_not logical_or logical_xor
        matmul max maximum mean min minimum mish mod multiply ndarray negative no_reorder
        not_equal num_programs ones power prelu private_hbm prod program_id program_ndim psum
        rand random_seed reciprocal relu right_shift rms_norm rsqrt sbuf sequential_range
        shared_constant shared_hbm shared_identity_matrix sigmoid sign silu silu_dx sin softmax
        softplus sqrt square static_range store subtract sum tan tanh tfloat32 tile_size
        transpose trunc uint16 uint32 uint8 var where while_loop zeros zeros_like
    """,
    "nki.collectives": """
        ReplicaGroup all_gather all_gather_v all_reduce all_to_all all_to_all_v
        collective_permute collective_permute_implicit
        collective_permute_implicit_current_processing_rank_id
        collective_permute_implicit_reduce rank_id reduce_scatter
    """,
}


@pytest.mark.parametrize("module", STUBS)
def test_every_name_of_the_stubs_is_there_or_refuses_its_use(module):
    for name in STUBS[module].split():
        found = getattr(MODULES[module], name)
        if isinstance(found, Missing):
            with pytest.raises(NotModelledError, match=rf"{name} is not modelled \[nki\..*\]$"):
                found()


def test_names_that_are_not_modelled_can_be_told_apart(tmp_path):
    (tmp_path / "kernels.py").write_text(TABLE)
    kernels = load(tmp_path / "kernels.py")
    assert len(kernels.SIZES) == 4
    assert kernels.oob_mode.skip.value == 1


TABLE = """
import nki
import nki.collectives as ncc
import nki.dtype as nt
import nki.language as nl
from nki.isa.constants import oob_mode

SIZES = {nl.float8_e4m3fn_x4: 1, nl.float8_e5m2_x4: 1, nl.float4_e2m1fn_x4: 2, nt.bfloat16: 2}
SLOPES = {"prelu": nl.prelu}
ODD = [x for x in (ncc.rank_id, nki.dtype.float32) if x in SIZES]
"""


def test_modules_are_imported_by_name(monkeypatch):
    for name, module in MODULES.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name, module in MODULES.items():
        assert importlib.import_module(name) is module
