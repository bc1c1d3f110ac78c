"""Kernels of other repositories that have no tests of their own here: inputs and references.

A case is a call, and what it should return. The kernels' files are read from the checkouts.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import math
import operator
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from nki_paged_attn.sim import Kernel, loader
from recorder import Wrong

F32, BF16 = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


@dataclass
class Case:
    """A call of a kernel with its reference, or a harness of its repository's own."""

    repository: str
    file: str
    kernel: str
    inputs: Any = None
    expected: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-4
    programs: int = 1
    # the header that the repository's harness puts before a kernel
    is_bare: bool = False
    # outputs are among the arguments
    in_place: int = 0

    def run(self, root: Path) -> None:
        """Run the kernel, and compare with the reference."""
        rng = np.random.default_rng(0)
        path = root / self.repository / self.file
        kernel = getattr(load(path, bare=self.is_bare), self.kernel)
        if isinstance(kernel, types.FunctionType):
            kernel = loader.NKI.jit(kernel)
        if not isinstance(kernel, Kernel):
            raise TypeError(f"{self.kernel} is no kernel of nki")
        inputs = self.inputs(rng)
        wanted = self.expected(*(np.asarray(x, np.float64) for x in inputs if is_array(x)))
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        outputs = [np.zeros(np.shape(x), F32) for x in wanted[: self.in_place]]
        got = kernel[self.programs](*inputs, *outputs, **self.options)
        got = outputs if self.in_place else got if isinstance(got, tuple) else (got,)
        for number, (a, b) in enumerate(zip(got, wanted, strict=False)):
            a, b = np.asarray(a).astype(np.float64), np.asarray(b)
            if a.shape != b.shape:
                raise Wrong(f"result {number} has the shape {a.shape}, not {b.shape}")
            off, room = np.abs(a - b).max(), self.tolerance * max(1.0, np.abs(b).max())
            if not off <= room:
                raise Wrong(f"result {number} is off by {off:.3g}, not {room:.3g}")


@dataclass
class Harness:
    """A test of autocomp's own, with the solution put into it, as its evaluation does."""

    repository: str
    file: str
    harness: str
    kernel: str = "solution"

    def run(self, root: Path) -> None:
        """Run the harness's comparison."""
        folder = root / self.repository
        text = (folder / self.harness).read_text()
        code = text.replace("# SUBSTITUTE HERE", (folder / self.file).read_text())
        module = types.ModuleType("harness")
        exec(compile(code, str(folder / self.file), "exec"), module.__dict__)
        reference = getattr(module, "ref", None) or module.solution
        if not module.test_nki(reference, module.solution):
            raise Wrong("its harness says so")


def is_array(x: Any) -> bool:
    return isinstance(x, np.ndarray)


def load(path: Path, *, bare: bool) -> types.ModuleType:
    """Import a file; a bare one gets the names that its harness imports before it."""
    if "nkilib_src" in path.parts:
        # a package, whose modules import each other
        inside = path.with_suffix("").parts
        return importlib.import_module(".".join(inside[inside.index("nkilib_src") :]))
    spec = importlib.util.spec_from_file_location("upstream_kernel", path)
    module = importlib.util.module_from_spec(spec)
    if bare:
        names = {"nki": loader.NKI, "nl": loader.NKI.language, "nisa": loader.NKI.isa, "np": np}
        more = {"math": math, "reduce": functools.reduce, "mul": operator.mul}
        vars(module).update(names | more)
    spec.loader.exec_module(module)
    return module


def draw(*shapes, dtype=F32, scale=1.0):
    return lambda rng: [(scale * rng.standard_normal(s)).astype(dtype) for s in shapes]


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attention(q, k, v, *, scale=1.0, seen=None, sink=None):
    """Plain attention of ``[..., rows, d]``; ``seen`` says which keys a row sees."""
    s = scale * (q @ np.swapaxes(k, -1, -2))
    if seen is not None:
        s = np.where(seen, s, -np.inf)
    if sink is not None:
        s = np.concatenate([s, np.broadcast_to(sink, (*s.shape[:-1], 1))], axis=-1)
    return softmax(s)[..., : k.shape[-2]] @ v


def causal(rows, keys=None, *, window=None, shift=0):
    i, j = np.arange(rows)[:, None] + shift, np.arange(keys or rows)
    return (j <= i) & (j > i - (window or 10**9))


def matmul(a, b):
    return a.T @ b


def mamba(delta, u, a, b, c):
    state, out = np.zeros((*delta.shape[:2], a.shape[1])), np.zeros_like(delta)
    for t in range(delta.shape[2]):
        d = delta[:, :, t, None]
        state = np.exp(d * a) * state + d * u[:, :, t, None] * b[:, None, :, t]
        out[:, :, t] = (state * c[:, None, :, t]).sum(axis=-1)
    return out


def pool(x, size, reduce):
    c, h, w = x.shape
    return reduce(x.reshape(c, h // size, size, w // size, size), axis=(2, 4))


def rotate(x, cos, sin):
    half = x.shape[0] // 2
    a, b = x[:half], x[half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin])


def windows(x, size=3):
    """The largest of each window of an array, without padding."""
    rows, columns = x.shape[0] - size + 1, x.shape[1] - size + 1
    parts = [x[i : i + rows, j : j + columns] for i in range(size) for j in range(size)]
    return np.max(parts, axis=0)


def layernorm(x, gamma, beta):
    mean, var = x.mean(axis=1, keepdims=True), x.var(axis=1, keepdims=True)
    return (x - mean) / np.sqrt(var + 1e-5) * gamma + beta


def rmsnorm(x, gamma, eps=0.0):
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * gamma


SDK, EXAMPLES = "aws-neuron-sdk", "nki/examples"
TUTORIAL = "matrix_multiplication/matrix_multiplication_nki_kernels.py"
MATMULS = {
    "nki_matmul_basic_": ((128, 64), (128, 512)),
    "nki_matmul_tiled_": ((256, 128), (256, 512)),
    "nki_matmul_hoist_load_": ((256, 128), (256, 512)),
    "nki_matmul_block_free_dimension_": ((256, 256), (256, 1024)),
    "nki_matmul_fully_optimized_": ((1024, 2048), (1024, 1024)),
}
MAMBA = [(1, 128, 512), (1, 128, 512), (128, 2), (1, 2, 512), (1, 2, 512)]
CASES: list[Any] = [
    *(
        Case(SDK, f"{EXAMPLES}/{file}.py", "nki_tensor_add_kernel", draw((4, 3), (4, 3)), np.add)
        for file in ("getting_started_baremetal", "getting_started_jax", "getting_started_torch")
    ),
    Case(
        SDK,
        f"{EXAMPLES}/index-case-1.py",
        "tensor_split_kernel_",
        draw((128, 16)),
        lambda x: (x[:, ::2], x[:, 1::2]),
    ),
    Case(
        SDK,
        f"{EXAMPLES}/index-case-3.py",
        "tensor_maxpool_kernel_",
        draw((2, 6, 6)),
        lambda x: pool(x, 2, np.max),
        {"sz_pool": 2},
    ),
    *(
        Case(SDK, f"{EXAMPLES}/layout-{name}.py", "tensor_exp_kernel_", draw((rows, 512)), np.exp)
        for name, rows in (("dynamic-loop", 256), ("loop", 256), ("pass", 128), ("violation", 256))
    ),
    Case(
        SDK,
        f"{EXAMPLES}/average_pool2d/average_pool2d_nki_kernels.py",
        "tensor_avgpool_kernel",
        draw((2, 6, 6)),
        lambda x: pool(x, 2, np.mean),
        {"pool_size": 2},
    ),
    *(
        Case(
            SDK,
            f"{EXAMPLES}/fused_mamba/mamba_nki_kernels.py",
            f"mamba_v{n}",
            draw(*MAMBA, scale=0.3),
            mamba,
        )
        for n in (1, 2, 3)
    ),
    *(
        Case(SDK, f"{EXAMPLES}/{TUTORIAL}", name, draw(*shapes, dtype=BF16), matmul, tolerance=1e-2)
        for name, shapes in MATMULS.items()
    ),
    Case(
        SDK,
        f"{EXAMPLES}/simulate/nki_simulate_example.py",
        "add_kernel",
        draw((128, 512), (128, 512)),
        np.add,
    ),
    Case(
        SDK,
        f"{EXAMPLES}/tensor_addition/tensor_addition_nki_kernels.py",
        "nki_tensor_add",
        draw((256, 1024), (256, 1024)),
        np.add,
    ),
    Case(
        SDK,
        f"{EXAMPLES}/transpose2d/transpose2d_nki_kernels.py",
        "tensor_transpose2D_kernel_",
        draw((2, 12)),
        lambda x: x.reshape(2, 3, 4).swapaxes(1, 2).reshape(2, 12),
        {"shape2D": (3, 4)},
    ),
    *(
        Case(
            "nki-samples",
            f"src/nki_samples/tutorials/{TUTORIAL}",
            name,
            draw(*shapes, dtype=BF16),
            matmul,
            tolerance=1e-2,
        )
        for name, shapes in MATMULS.items()
    ),
]

VIZ, BETA2 = "triton-viz", "examples/nki_beta2"
CASES += [
    Case(
        VIZ,
        f"{BETA2}/add.py",
        "nki_tensor_add_kernel",
        draw((128, 64), (128, 64)),
        np.add,
        in_place=1,
    ),
    Case(
        VIZ, f"{BETA2}/matmul.py", "matmul_kernel", draw((128, 128), (128, 512)), matmul, in_place=1
    ),
    Case(
        VIZ,
        f"{BETA2}/mlp.py",
        "mlp_kernel",
        draw((128, 128), (128, 512), (512, 512), scale=0.1),
        lambda x, a, b: np.maximum(x.T @ a, 0) @ b,
        in_place=1,
    ),
    Case(
        VIZ,
        f"{BETA2}/rmsnorm.py",
        "rmsnorm_kernel",
        draw((128, 64), (128, 64)),
        lambda x, g: rmsnorm(x, g, 1e-6),
        in_place=1,
    ),
    Case(VIZ, f"{BETA2}/softmax.py", "softmax_kernel", draw((128, 64)), softmax, in_place=1),
]

AUTOTUNE, LIBRARY = "nki-autotune", "kernel_library"
CASES += [
    Case(
        AUTOTUNE,
        f"{LIBRARY}/matmul/lhsT_rhs/kernel_hand_90.92mfu.py",
        "matmul_lhsT_rhs_nkigym",
        draw((2048, 2048), (2048, 2048), dtype=BF16),
        matmul,
        tolerance=1e-2,
    ),
    Case(
        AUTOTUNE,
        f"{LIBRARY}/matmul/lhs_rhs/kernel_handtuned_89.26mfu.py",
        "matmul_lhs_rhs_nkigym",
        draw((2048, 2048), (2048, 2048), dtype=BF16),
        operator.matmul,
        tolerance=1e-2,
    ),
    Case(
        AUTOTUNE,
        f"{LIBRARY}/rmsnorm_matmul/kernel_hand_online.py",
        "rmsnorm_matmul_online",
        draw((2048, 2048), (2048, 2048), dtype=BF16, scale=0.1),
        lambda x, w: rmsnorm(x, 1.0, 1e-6) @ w,
        tolerance=3e-2,
    ),
]

AUTOCOMP, ADVANCED, TUTORIALS = "autocomp", "sols/trn-advanced-nki2", "sols/trn-tutorial-nki2"


def bare(file, inputs, expected, **options):
    return Case(AUTOCOMP, file, "solution", inputs, expected, is_bare=True, **options)


def expand(rng):
    delta, u, a, b, c = (np.abs(x) for x in draw(*MAMBA, scale=0.3)(rng))
    return [delta, u, -a, *(np.repeat(x, 128, axis=1) for x in (b, c))]


CASES += [
    bare(
        f"{ADVANCED}/0_cumsum_ref.py", draw((256, 512)), lambda x: x.cumsum(axis=1), tolerance=1e-3
    ),
    bare(
        f"{ADVANCED}/1_transpose_ref.py",
        draw((128, 128, 64)),
        lambda x: x.transpose(0, 2, 1),
        options={"dim": 1},
    ),
    bare(f"{ADVANCED}/2_maxpool_ref.py", draw((256, 256)), windows, options={"pool_size": 3}),
    bare(f"{ADVANCED}/3_rope_ref.py", draw((128, 512), (64, 512), (64, 512)), rotate),
    bare(
        f"{TUTORIALS}/0_rmsnorm_ref.py",
        draw((256, 512), (512,)),
        lambda x, g: rmsnorm(x, g),
        tolerance=1e-3,
    ),
    bare(
        f"{TUTORIALS}/1_layernorm_ref.py",
        lambda rng: [*draw((256, 1024))(rng), 1e-5, *draw((1024,), (1024,))(rng)],
        layernorm,
        tolerance=1e-3,
    ),
    bare(
        f"{TUTORIALS}/2_gemm_ref.py",
        draw((512, 512), (512, 512), dtype=BF16),
        matmul,
        tolerance=2e-2,
    ),
    bare(
        f"{TUTORIALS}/3_mamba_ref.py",
        expand,
        lambda d, u, a, b, c: mamba(d, u, a, b[:, ::128], c[:, ::128]),
    ),
    bare(
        f"{TUTORIALS}/4_attention_ref.py",
        draw((128, 512), (128, 512), (128, 512), scale=0.3),
        lambda q, k, v: attention(q.T, k.T, v.T),
        tolerance=2e-2,
    ),
    bare(
        f"{TUTORIALS}/5_sdattention_ref.py",
        draw((512, 64), (512, 64), (512, 64), scale=0.5),
        lambda q, k, v: attention(q, k, v, scale=0.125),
        tolerance=2e-2,
    ),
    *(
        Harness(
            AUTOCOMP, f"sols/trn-internal/{name}_ref.py", f"harnesses/trn-internal/{name}_test.py"
        )
        for name in (
            "10_openfold3_trimul",
            "12_flashvsr_fp32attn",
            "15_gemm",
            "3_triattn",
            "4_trimul",
            "5_fft256",
            "6_mamba_scan",
            "7_trotter",
            "8_deltanet_recurrent",
        )
    ),
]

LIB, CTE = "nki-library", "src/nkilib_src/nkilib/core/attention/attention_cte.py"


def cte(inputs, expected, programs, **options):
    return Case(LIB, CTE, "attention_cte", inputs, expected, options, 2e-2, programs)


def prior(q, k, v, kp, vp, used):
    """A prefix of keys before the row's own; ``used`` of them count."""
    count = int(used[0])
    keys, values = (np.concatenate([p[:, :count], x], 1) for p, x in ((kp, k), (vp, v)))
    rows = q.shape[1]
    return attention(q, keys, values, seen=causal(rows, count + rows, shift=count))


Q = [(2, 256, 128)] * 3


FORMS: list[Any] = [
    ({}, lambda q, k, v: attention(q, k, v, seen=causal(256))),
    ({"causal_mask": False}, attention),
    (
        {"tp_out": True},
        lambda q, k, v: attention(q, k, v, seen=causal(256)).swapaxes(1, 2),
    ),
    ({"scale": 0.25}, lambda q, k, v: attention(q, k, v, scale=0.25, seen=causal(256))),
    (
        {"sliding_window": 100},
        lambda q, k, v: attention(q, k, v, seen=causal(256, window=100)),
    ),
    (
        {"cache_softmax": True},
        lambda q, k, v: attention(q, k, v, seen=causal(256)),
    ),
]
CASES += [
    cte(draw(*Q, dtype=BF16, scale=0.3), expected, programs, tp_k=True, **options)
    for options, expected in FORMS
    for programs in (1, 2)
]


def with_sink(rng):
    q, k, v = draw(*Q, dtype=BF16, scale=0.3)(rng)
    return [q, k, v, 1.0, True, None, None, None, *draw((2, 1))(rng)]


def with_prior(rng):
    q, k, v, kp, vp = draw(*Q, *[(2, 512, 128)] * 2, dtype=BF16, scale=0.3)(rng)
    return [q, k, v, 1.0, True, kp, vp, np.array([300], np.int32)]


CASES += [
    cte(inputs, expected, programs, tp_k=True)
    for inputs, expected in (
        (
            with_sink,
            lambda q, k, v, s: attention(q, k, v, seen=causal(256), sink=s[:, None, :]),
        ),
        (with_prior, prior),
    )
    for programs in (1, 2)
]
