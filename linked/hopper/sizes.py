"""Numbers that the Hopper kernels and their launches share."""

# rows of a warpgroup
ROWS = 64
# rows of a ragged tensor map, which clips at the end of any sequence; see ``pipeline.coordinates``
RAGGED_ROWS = 1 << 30
