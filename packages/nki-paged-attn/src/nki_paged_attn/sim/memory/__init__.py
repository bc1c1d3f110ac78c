"""Tensors and the memories in which they lie, registers, and the machine that has them."""
