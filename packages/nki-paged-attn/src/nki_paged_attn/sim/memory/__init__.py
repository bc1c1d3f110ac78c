"""Tensors, the memories in which they lie, registers, and the machine that owns them."""
