"""A model of all packages' operators, exported and compiled ahead of time by Inductor."""

from __future__ import annotations

import os
import shutil

import pytest

MODEL = """
import sys

import blocksparse_attn
import flash_attn_triton
import lightning_attn
import prefix_prefill
import torch

HEADS, DIM, PAGE = 4, 16, 16
LAYOUT = blocksparse_attn.BlockSparseLayout.local_strided(
    HEADS, 64, block_size=16, local_blocks=2, vert_stride=2
)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.project = torch.nn.Linear(HEADS * DIM, 3 * HEADS * DIM)
        self.sinks = torch.nn.Parameter(torch.randn(HEADS))
        self.register_buffer("decay", lightning_attn.build_slopes(HEADS))
        self.register_buffer("pages", torch.randn(2, 8, PAGE, HEADS, DIM))
        self.register_buffer("table", torch.arange(8, dtype=torch.int32).view(2, 4))
        self.register_buffer("ends", torch.arange(3, dtype=torch.int32))

    def forward(self, x, lengths):
        q, k, v = self.project(x).unflatten(-1, (3 * HEADS, DIM)).chunk(3, -2)
        full = flash_attn_triton.flash_attn_func(q, k, v, causal=True, sinks=self.sinks)
        sparse = blocksparse_attn.blocksparse_attn_func(q, k, v, LAYOUT)
        linear, _ = lightning_attn.lightning_attn_func(q, k, v, self.decay)
        cached = prefix_prefill.paged_attn_func(
            q[:, -1], *self.pages.unbind(), self.table, self.ends, lengths, 1, 64
        )
        return full, sparse, linear, cached


torch.manual_seed(0)
model, lengths = Model().eval(), torch.tensor([5, 64], dtype=torch.int32)
"""

COMPILE = """
from torch.export import Dim, export

tokens = {0: Dim.STATIC, 1: Dim.AUTO}
with torch.no_grad():
    graph = export(model, (torch.randn(2, 17, HEADS * DIM), lengths), dynamic_shapes=(tokens, None))
    torch._inductor.aoti_compile_and_package(
        graph,
        package_path="model.pt2",
        inductor_configs={"aot_inductor.compile_wrapper_opt_level": "O0"},
    )
"""

RUN = """
loaded = torch._inductor.aoti_load_package("model.pt2")
for count in (17, 29):
    x = torch.randn(2, count, HEADS * DIM)
    with torch.no_grad():
        for name, got, want in zip("fslc", loaded(x, lengths), model(x, lengths), strict=True):
            assert want.abs().max() > 0.01
            torch.testing.assert_close(got, want, msg=lambda text: f"{name}: {text}")
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a compiler for C++")
def test_a_compiled_package_of_a_model_runs_in_another_process(python, tmp_path):
    environment = {x: y for x, y in os.environ.items() if x != "TRITON_INTERPRET"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "cache")
    for code in (COMPILE, RUN):
        python(MODEL + code, cwd=tmp_path, env=environment)
