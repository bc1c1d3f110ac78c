"""The harness of the benchmarks: linked into those of every package that measures on GPUs."""

import os

# kernels compile in processes of the harness's own; read when torch first compiles
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
