"""Names of the kernels' arguments that are taken as they come.

A variant per value or alignment would give a stride its own rounding and a length its own
compilation, and would have to be looked up at every call.
"""

NUMBERS = (
    "window_left", "window_right", "batch", "heads_k", "heads_q", "tokens", "units", "splits",
    "rows", "slots",
    "stride_qs", "stride_qh", "stride_os", "stride_oh",
    "stride_kcp", "stride_kcs", "stride_kch", "stride_kcx", "stride_kcd",
    "stride_vcp", "stride_vcs", "stride_vch", "stride_vcx", "stride_vcd",
    "stride_ks", "stride_kh", "stride_vs", "stride_vh",
    "stride_table_b", "stride_table_p", "stride_alibi_b", "stride_slot",
)  # fmt: skip
POINTERS = (
    "q_ptr", "k_cache_ptr", "v_cache_ptr", "k_ptr", "v_ptr", "out_ptr", "lse_ptr",
    "block_table_ptr", "cu_seqlens_q_ptr", "seqlens_k_ptr", "positions_ptr", "alibi_slopes_ptr",
    "sinks_ptr", "q_descale_ptr", "k_descale_ptr", "v_descale_ptr", "k_scale_ptr", "v_scale_ptr",
    "out_scale_ptr", "out_a_ptr", "out_b_ptr", "lse_a_ptr", "lse_b_ptr", "slot_mapping_ptr",
)  # fmt: skip
