"""How a call reaches the kernel: checks, forms and their tables, launches."""
