"""Tiles in panels: a head dimension between two powers of two is cut into a wide and a narrow one.

Each panel is a separate tile, with its own swizzle and tensor map. Buffers, maps, tiles and
accumulators come as tuples ``(wide,)`` or ``(wide, narrow)``. Scores are one sum over the panels of
queries and keys. The output and each gradient have one accumulator per panel.
"""

from ..._linked.hopper.compat import add_out, copy_in, copy_out, gl, gluon, hopper, mbarrier
from ..._linked.hopper.gradients import add_to_memory, in_rows, write
from ..._linked.hopper.ptx import shrink
from .backward import arguments


@gluon.constexpr_function
def accumulator(columns):
    """Return the layout of a warpgroup's wgmma accumulator with ``columns`` columns."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


# ---- shared memory


@gluon.jit
def allocate(descs, COUNT: gl.constexpr):
    """Allocate ``COUNT`` tiles: for each panel ``[COUNT, *box of its tensor map]``."""
    return [_allocate_panel(desc, COUNT) for desc in descs]


@gluon.jit
def _allocate_panel(desc, COUNT: gl.constexpr):
    BOX: gl.constexpr = desc.block_type.shape
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, 1, BOX[2], BOX[3], BOX[4]], desc.layout)


@gluon.jit
def tile_of(buffers, number, ROWS: gl.constexpr):
    """Return the panels of a tile, ``[ROWS, width]`` each."""
    return [buffer.index(number).reshape([ROWS, buffer.shape[5]]) for buffer in buffers]


@gluon.jit
def copy_tile(descs, where, full, buffers, number):
    """Copy a tile into its panels by TMA; all panels arrive at one mbarrier."""
    expect_tiles(descs, full, 1)
    copy_panels(descs, where, full, buffers, number)


@gluon.jit
def expect_tiles(descs, full, COUNT: gl.constexpr):
    """Make an mbarrier expect ``COUNT`` tiles, all panels of each."""
    MORE: gl.constexpr = descs[1].block_type.nbytes if len(descs) > 1 else 0
    mbarrier.expect(full, COUNT * (descs[0].block_type.nbytes + MORE))


@gluon.jit
def copy_panels(descs, where, full, buffers, number):
    """Copy a tile into its panels; the mbarrier already expects them."""
    copy_in(descs[0], where, full, buffers[0].index(number))
    if len(descs) > 1:
        copy_in(descs[1], _behind(descs, where), full, buffers[1].index(number))


@gluon.jit
def store_tile(o, buffers, number, ROWS: gl.constexpr):
    """Store a tile in its panels, for TMA to read."""
    for i in gl.static_range(len(o)):
        panel = buffers[i].index(number).reshape([ROWS, o[i].shape[1]])
        panel.store(o[i].to(panel.dtype))
    hopper.fence_async_shared()


@gluon.jit
def add_tile(o, factor, buffers, number, ROWS: gl.constexpr):
    """Add a tile, its rows multiplied by ``factor``, to the panels ``o``, ``[ROWS, width]``."""
    sums = (_add_panel(o[0], factor, buffers[0].index(number), ROWS),)
    for i in gl.static_range(1, len(o)):
        sums += (_add_panel(o[i], factor, buffers[i].index(number), ROWS),)
    return sums


@gluon.jit
def _add_panel(o, factor, panel, ROWS: gl.constexpr):
    O: gl.constexpr = o.type.layout
    more = panel.reshape([ROWS, o.shape[1]]).load(O).to(gl.float32)
    return o + more * gl.convert_layout(factor, gl.SliceLayout(1, O))[:, None]


@gluon.jit
def copy_tile_out(descs, where, buffers, number):
    """Start the TMA copies of a tile's panels to memory."""
    copy_out(descs[0], where, buffers[0].index(number))
    if len(descs) > 1:
        copy_out(descs[1], _behind(descs, where), buffers[1].index(number))


@gluon.jit
def _behind(descs, where):
    """Return the coordinates of a tile's narrow panel: after the columns of the wide panel."""
    COLUMN: gl.constexpr = descs[0].block_type.shape[4]
    return (where[0], where[1], where[2], where[3], COLUMN)


# ---- products


@gluon.jit
def multiply_keys(q, k, zeros):
    """Issue the product of queries and keys, ``[ROWS, BLOCK_N]``."""
    return multiply_rows(q, k, zeros, False)


@gluon.jit
def multiply_rows(a, b, start, use_acc: gl.constexpr):
    """Issue the product of the rows of two tiles, a sum over panels that begins at ``start``."""
    s = hopper.warpgroup_mma(a[0], b[0].permute((1, 0)), start, use_acc=use_acc, is_async=True)
    for i in gl.static_range(1, len(a)):
        s = hopper.warpgroup_mma(a[i], b[i].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def multiply_values(p, v, o):
    """Issue the product of probabilities and values for each panel, ``[ROWS, width]``."""
    sums = (hopper.warpgroup_mma(p, v[0], o[0], is_async=True),)
    for i in gl.static_range(1, len(o)):
        # the same registers in another layout
        P: gl.constexpr = gl.DotOperandLayout(0, o[i].type.layout, 2)
        same = gl.convert_layout(p, P, assert_trivial=True)
        sums += (hopper.warpgroup_mma(same, v[i], o[i], is_async=True),)
    return sums


@gluon.jit
def wait_for_values(o):
    """Wait for all products, including those of ``multiply_values``."""
    return wait_for(o, 0)


@gluon.jit
def wait_for(sums, LEFT: gl.constexpr):
    """Wait for the products of a tuple of panels, but not for the ``LEFT`` issued last."""
    found = hopper.warpgroup_mma_wait(LEFT, deps=sums)
    return (found,) if len(sums) == 1 else found


@gluon.jit
def wait_for_all(sums, other):
    """Wait for all products: of a tuple of panels, and of ``other``; return both."""
    found = hopper.warpgroup_mma_wait(0, deps=sums + (other,))
    return found[: len(sums)], found[len(sums)]


@gluon.jit
def no_output(TILE: gl.constexpr):
    """Return an accumulator of zeros for each panel of the output, ``[ROWS, width]``."""
    layout: gl.constexpr = accumulator(TILE.HEAD_DIM_V)
    o = (gl.zeros([TILE.ROWS, TILE.HEAD_DIM_V], gl.float32, layout),)
    if TILE.NARROW_V > 0:
        layout_2: gl.constexpr = accumulator(TILE.NARROW_V)
        o += (gl.zeros([TILE.ROWS, TILE.NARROW_V], gl.float32, layout_2),)
    return o


@gluon.jit
def rescale(o, alpha, LAG: gl.constexpr):
    """Multiply the rows of each panel by ``alpha``, ``[ROWS]``; with ``LAG`` mostly 1."""
    return [_rescale_panel(panel, alpha, LAG) for panel in o]


@gluon.jit
def _rescale_panel(o, alpha, LAG: gl.constexpr):
    factors = gl.convert_layout(alpha, gl.SliceLayout(1, o.type.layout))[:, None]  # [ROWS, 1]
    return shrink(o, factors) if LAG else o * factors


@gluon.jit
def finish(o, weight, empty):
    """Multiply the rows of each panel by ``weight``, and set ``empty`` rows to 0."""
    return [_finish_panel(panel, weight, empty) for panel in o]


@gluon.jit
def _finish_panel(o, weight, empty):
    O: gl.constexpr = o.type.layout
    o = o * gl.convert_layout(weight, gl.SliceLayout(1, O))[:, None]  # [ROWS, width]
    # fully masked rows: values that no row sees may be NaN
    return gl.where(gl.convert_layout(empty, gl.SliceLayout(1, O))[:, None], 0.0, o)


# ---- gradients


@gluon.jit
def no_gradient(ROWS: gl.constexpr, WIDE: gl.constexpr, NARROW: gl.constexpr):
    """Return an accumulator of zeros for each panel of a gradient, ``[ROWS, width]``."""
    layout: gl.constexpr = accumulator(WIDE)
    sums = (gl.zeros([ROWS, WIDE], gl.float32, layout),)
    if NARROW > 0:
        layout_2: gl.constexpr = accumulator(NARROW)
        sums += (gl.zeros([ROWS, NARROW], gl.float32, layout_2),)
    return sums


has_panel_each = gluon.constexpr_function(arguments.has_panel_each)


@gluon.constexpr_function
def splits_by_panel(tile):
    """Tell whether each warpgroup makes one panel of dq; see ``has_panel_each``."""
    return has_panel_each(tile.HEAD_DIM, tile.NARROW, tile.BLOCK_M, tile.BLOCK_N)


@gluon.constexpr_function
def rows_before(tile, w):
    """Return how many rows of 32 numbers lie before warpgroup ``w``'s part of a tile of dq."""
    is_each = has_panel_each(tile.HEAD_DIM, tile.NARROW, tile.BLOCK_M, tile.BLOCK_N)
    columns = 2 * tile.HEAD_DIM if is_each else tile.HEAD_DIM + tile.NARROW
    return w * tile.BLOCK_M * columns // 64


@gluon.jit
def own_panels(panels, W: gl.constexpr, TILE: gl.constexpr):
    """Return the panels of dq, or buffers or maps of them, of which warpgroup ``W`` has a part."""
    return (panels[W],) if splits_by_panel(TILE) else panels


@gluon.jit
def part_of(tile, NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Return one of ``COUNT`` parts of the columns of each panel."""
    return [_part_of_panel(panel, NUMBER, COUNT) for panel in tile]


@gluon.jit
def _part_of_panel(panel, NUMBER: gl.constexpr, COUNT: gl.constexpr):
    WIDTH: gl.constexpr = panel.shape[1] // COUNT
    return panel.slice(NUMBER * WIDTH, WIDTH, 1)


@gluon.jit
def multiply_gradient(a, b, sums, use_acc: gl.constexpr):
    """Issue the product of a tile in shared memory and each panel of another one."""
    made = (hopper.warpgroup_mma(a, b[0], sums[0], use_acc=use_acc, is_async=True),)
    for i in gl.static_range(1, len(sums)):
        made += (hopper.warpgroup_mma(a, b[i], sums[i], use_acc=use_acc, is_async=True),)
    return made


@gluon.jit
def scale_panels(sums, factor):
    """Multiply each panel by a number."""
    return [_scale_panel(panel, factor) for panel in sums]


@gluon.jit
def _scale_panel(panel, factor):
    return panel * factor


@gluon.jit
def write_panels(gradient, descs, where, buffers, number):
    """Start the TMA stores of a warpgroup's rows of a gradient, through ``buffers``."""
    WIDE: gl.constexpr = gradient[0].shape[1]
    write(gradient[0], descs[0], buffers[0].index(number), where, WIDE)
    if len(descs) > 1:
        LESS: gl.constexpr = gradient[1].shape[1]
        write(gradient[1], descs[1], buffers[1].index(number), _behind(descs, where), LESS)


@gluon.jit
def panels_in_rows(sums):
    """Return a warpgroup's accumulators in the order of their registers, as rows of 32 numbers."""
    return [in_rows(panel) for panel in sums]


@gluon.jit
def stage_panels(rows, buffers, number):
    """Store the rows of ``panels_in_rows`` in ``buffers``, for TMA to add."""
    for i in gl.static_range(len(rows)):
        buffers[i].index(number).store(rows[i])
    hopper.fence_async_shared()


@gluon.jit
def add_panels(descs, row, buffers, number):
    """Start the TMA additions of the buffers; the narrow panel's rows follow the wide panel's."""
    add_out(descs[0], [row, 0], buffers[0].index(number))
    if len(descs) > 1:
        add_out(descs[1], [row + buffers[0].shape[1], 0], buffers[1].index(number))


@gluon.jit
def add_by_threads(sums, pointer):
    """Add a warpgroup's accumulators to memory, first the wide panel, then the narrow one."""
    add_to_memory(pointer, sums[0])
    if len(sums) > 1:
        SIZE: gl.constexpr = 64 * sums[0].shape[1]
        add_to_memory(pointer + SIZE, sums[1])
