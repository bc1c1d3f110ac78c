"""The kernels, in the dialect of NKI 0.6 and 0.7; nothing here is imported with the package.

These files import ``nki`` by name, so the same lines run on a device, in AWS's simulator and in the
simulator of this package, whose loader provides its own ``nki``.
"""
