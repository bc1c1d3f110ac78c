"""Kernels that were shipped compiled: their folders, and launches without a compiler."""
