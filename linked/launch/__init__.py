"""Launches of compiled kernels, imported by the first call that needs one."""

from ..host.versions import need_triton

need_triton(f"a kernel of {__name__.partition('.')[0].replace('_', '-')}")
