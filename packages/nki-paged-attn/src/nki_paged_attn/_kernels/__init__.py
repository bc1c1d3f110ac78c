"""The kernels, in the dialect of NKI 0.6 and 0.7; nothing here is imported with the package.

These files import ``nki`` itself, so that the lines which run on a device and in AWS's simulator
are the lines which run in ours, whose loader gives them its own ``nki``.
"""
