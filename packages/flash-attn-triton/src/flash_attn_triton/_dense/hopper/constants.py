"""Constants of a launch, for device functions."""

from ..._linked.hopper.compat import gl, gluon


@gluon.constexpr_function
def named(constants):
    """Return a structure with each field a constant: Triton 3.6 takes no plain ones in lists.

    The structure is a ``NamedTuple``, or Triton's own tuple from 3.9 on.
    """
    fields = [gl.constexpr(x) for x in constants]
    if isinstance(constants, tuple):
        return constants.__class__(*fields)
    return constants.__class__(fields, constants.type)
