"""RMSNorm: rows divided by their root mean square, times a weight for each column.

Run it on the simulator: ``python examples/rms_norm.py``.
"""

from nki_paged_attn.sim import install

install()

import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def rms_norm_kernel(x, weight, epsilon):
    """Return ``x / sqrt(mean(x * x) + epsilon) * weight``; x ``[rows, columns]``."""
    rows, columns = x.shape
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    # a DMA may read one row for all partitions
    scale = nl.ndarray((128, columns), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=scale, src=weight.ap([[0, 128], [1, columns]]))
    for start in range(0, rows, 128):
        count = min(128, rows - start)
        tile = nl.ndarray((count, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.dma_copy(dst=tile, src=x[start : start + count, :])
        squares = nl.ndarray((count, columns), dtype=nl.float32, buffer=nl.sbuf)
        total = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation_reduce(
            dst=squares, op=nl.square, data=tile, reduce_op=nl.add, reduce_res=total
        )
        mean = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_scalar(
            dst=mean,
            data=total,
            op0=nl.multiply,
            operand0=1.0 / columns,
            op1=nl.add,
            operand1=epsilon,
        )
        inverse = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=inverse, op=nl.rsqrt, data=mean)
        result = nl.ndarray((count, columns), dtype=x.dtype, buffer=nl.sbuf)
        nisa.scalar_tensor_tensor(
            dst=result,
            data=tile,
            op0=nl.multiply,
            operand0=inverse,
            op1=nl.multiply,
            operand1=scale[:count, :],
        )
        nisa.dma_copy(dst=out[start : start + count, :], src=result)
    return out


if __name__ == "__main__":
    from run import main

    main("rms_norm")
