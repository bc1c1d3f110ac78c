"""A pytest plugin that lets nki-library's own tests run on the simulator.

The tests ask for a ``test_manager`` that compiles a kernel and runs it on a device. This one
simulates it, and compares with the tests' own references.
"""

from __future__ import annotations

import sys
import types
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest
from installer import Absent
from nki_paged_attn import sim
from recorder import KERNELS, Wrong

# modules that the tests import for reports and for devices
ABSENT = (
    "allpairspy",
    "aws_embedded_metrics",
    "boto3",
    "botocore",
    "fabric2",
    "filelock",
    "invoke",
    "pandas",
    "paramiko",
    "plotext",
    "pytest_html",
    "pytest_metadata",
    "test.utils.test_orchestrator",
)


def numbers():
    """Return ``neuron_dtypes``, AWS's module of number formats, as far as the tests use it."""
    module = types.ModuleType("neuron_dtypes")
    formats = ("bfloat16", "float8_e4m3", "float8_e4m3fn", "float8_e5m2")
    for name in formats:
        setattr(module, name, np.dtype(getattr(ml_dtypes, name)))

    def static_cast(x, dtype):
        dtype = np.dtype(getattr(ml_dtypes, dtype) if dtype in formats else dtype)
        if dtype.kind in "iu":
            return np.clip(np.rint(x.astype(np.float64)), *limits(dtype)).astype(dtype)
        return np.asarray(x).astype(np.float32).astype(dtype)

    def limits(dtype):
        return np.iinfo(dtype).min, np.iinfo(dtype).max

    module.static_cast = static_cast
    module.sizeinbytes = lambda dtype: np.dtype(dtype).itemsize
    module.finfo = ml_dtypes.finfo
    module.is_float_type = lambda x: np.dtype(getattr(x, "dtype", x)).kind not in "iub"
    for name in ("float8_e5m2_x4", "float8_e4m3fn_x4", "float4_e2m1fn_x4"):
        setattr(module, name, name)
    return module


sys.meta_path.insert(0, Absent(*ABSENT))
sys.modules.setdefault("neuron_dtypes", numbers())


class Manager:
    """What runs a test's kernel: the simulator, and a comparison with the reference."""

    def execute(self, case):
        arguments = {k.removesuffix(".must_alias_input"): v for k, v in case.kernel_input.items()}
        try:
            got = self.run(case, arguments, strict=True)
        except sim.UnwrittenError:
            # if the numbers are right, what was read made no difference
            got = self.run(case, arguments, strict=False)
        got = got if isinstance(got, tuple) else (got,)
        golden, names = self.references(case.validation_args.golden_output)
        if golden is None:
            return
        if len(got) != len(names):
            raise Wrong(f"{len(got)} results, {len(names)} references")
        for name, value in zip(names, got, strict=True):
            self.compare(name, value, golden[name], case.validation_args)

    @staticmethod
    def run(case, arguments, *, strict):
        compiler, kernel = case.compiler_input, case.kernel_func
        code = getattr(kernel, "function", kernel).__code__
        KERNELS.append((code.co_filename, code.co_name))
        kernel = kernel if isinstance(kernel, sim.Kernel) else sim.jit(kernel)
        # what a kernel writes must not reach the references
        arguments = {k: v.copy() if hasattr(v, "copy") else v for k, v in arguments.items()}
        target = compiler.platform_target.value[:4]
        return sim.simulate(kernel[compiler.logical_nc_config], target, strict=strict)(**arguments)

    @staticmethod
    def references(wanted):
        if hasattr(wanted, "output_ndarray"):
            return wanted.golden, list(wanted.output_ndarray)
        return wanted, list(wanted)

    @staticmethod
    def compare(name, got, want, limits):
        if hasattr(want, "validator"):
            if not want.validator(None).validate(got):
                raise Wrong(name)
            return
        a, b = np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
        if a.shape != b.shape:
            raise Wrong(f"{name} has the shape {a.shape}, not {b.shape}")
        # as the library compares: relative to the largest number
        room = limits.absolute_accuracy + limits.relative_accuracy * np.abs(b).max(initial=0.0)
        with np.errstate(invalid="ignore"):
            off = np.where(a == b, 0.0, np.abs(a - b))
        if not off.max(initial=0.0) <= room:
            raise Wrong(f"{name} is off by {off.max():.3g}, not {room:.3g}")


@pytest.fixture
def test_manager():
    return Manager()


@pytest.fixture
def collector():
    return MagicMock()


@pytest.fixture
def platform_target():
    from test.utils.common_dataclasses import Platforms

    return Platforms.TRN2


def pytest_configure(config):
    for mark in ("fast", "trace_only", "compile_only", "compile_and_infer", "simulation"):
        config.addinivalue_line("markers", mark)
