"""All packages in one process: every order of import, and nothing that an import should not do."""

import json

import pytest

PREAMBLE = """
import json, os, sys
import torch

def refuse(*_, **__):
    raise RuntimeError("a GPU was asked about at import")

for name in ("is_available", "device_count", "current_device", "get_device_properties",
             "get_device_capability", "get_device_name", "init", "_lazy_init"):
    setattr(torch.cuda, name, refuse)
before = dict(os.environ), set(sys.modules), set(torch._C._dispatch_get_all_op_names())
"""
REPORT = """
print(json.dumps({
    "environment": dict(os.environ) == before[0],
    "modules": sorted(set(sys.modules) - before[1]),
    "operators": sorted(set(torch._C._dispatch_get_all_op_names()) - before[2]),
}))
"""


@pytest.fixture
def imported(python):
    """Import packages in a fresh interpreter, and report what that changed."""

    def run(names):
        lines = [f"import {name.replace('-', '_')}" for name in names]
        return json.loads(python("\n".join((PREAMBLE, *lines, REPORT))))

    return run


def test_every_rotation_imports(imported, noxfile):
    packages = noxfile.PACKAGES
    for start in range(len(packages)):
        order = packages[start:] + packages[:start]
        assert imported(order)["environment"]


def test_import_leaves_the_process_as_it_was(imported, package):
    seen = imported([package])
    assert seen["environment"]
    loaded = {name.partition(".")[0] for name in seen["modules"]}
    assert not loaded & {"triton", "transformers", "neuronxcc", "nki", "numpy", "matplotlib"}


def test_import_loads_no_sibling_but_attn_common(imported, package, noxfile):
    loaded = {name.partition(".")[0] for name in imported([package])["modules"]}
    ours = {name.replace("-", "_") for name in noxfile.PACKAGES}
    assert loaded & ours <= {package.replace("-", "_"), "attn_common"}


def test_operators_stay_in_the_namespace_of_their_package(imported, package, noxfile):
    namespaces = {name.partition("::")[0] for name in imported([package])["operators"]}
    assert namespaces <= {package.replace("-", "_")}
    assert bool(namespaces) == (package in noxfile.KERNEL_PACKAGES)


def test_version_is_that_of_the_wheel(python, package):
    name = package.replace("-", "_")
    code = f"from importlib.metadata import version; import {name}; print(version({package!r}),"
    installed, stated = python(code + f"{name}.__version__)").split()
    assert installed == stated


def test_public_names_exist(python, package):
    name = package.replace("-", "_")
    python(f"import {name} as m; [getattr(m, n) for n in m.__all__]; from {name} import *")
