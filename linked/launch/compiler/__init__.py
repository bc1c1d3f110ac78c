"""Compiling and interpreting kernels; imported by the first launch that Triton has to prepare."""

from ...host.versions import need_triton

need_triton(f"a kernel of {__name__.partition('.')[0].replace('_', '-')}")
