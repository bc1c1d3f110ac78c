"""Linked into the benchmarks of packages that run on several GPUs."""
