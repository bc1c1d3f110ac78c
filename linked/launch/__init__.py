"""Launches of compiled kernels, imported by the first call that needs one."""
