"""All packages in one process: every order of import, and nothing that an import should not do."""

import functools
import json
import subprocess
import sys

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
seen = {
    "environment": dict(os.environ) == before[0],
    "modules": sorted(set(sys.modules) - before[1]),
    "operators": sorted(set(torch._C._dispatch_get_all_op_names()) - before[2]),
}
from importlib.metadata import version
seen["versions"] = [[version(m.__name__), m.__version__] for m in imported]
for m in imported:
    [getattr(m, name) for name in m.__all__]
    exec(f"from {m.__name__} import *")
print(json.dumps(seen))
"""


@functools.cache
def imported(*packages):
    """Import packages in a fresh interpreter; report what that changed, and what they hold."""
    names = [package.replace("-", "_") for package in packages]
    lines = [f"import {name}" for name in names]
    code = "\n".join((PREAMBLE, *lines, f"imported = [{', '.join(names)}]", REPORT))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


def test_every_rotation_imports(noxfile):
    packages = noxfile.PACKAGES
    for start in range(len(packages)):
        order = packages[start:] + packages[:start]
        assert imported(*order)["environment"]


def test_import_leaves_the_process_as_it_was(package):
    seen = imported(package)
    assert seen["environment"]
    loaded = {name.partition(".")[0] for name in seen["modules"]}
    assert not loaded & {"triton", "transformers", "neuronxcc", "nki", "numpy", "matplotlib"}


def test_import_loads_no_sibling_but_attn_common(package, noxfile):
    loaded = {name.partition(".")[0] for name in imported(package)["modules"]}
    ours = {name.replace("-", "_") for name in noxfile.PACKAGES}
    assert loaded & ours <= {package.replace("-", "_"), "attn_common"}


def test_operators_stay_in_the_namespace_of_their_package(package, noxfile):
    namespaces = {name.partition("::")[0] for name in imported(package)["operators"]}
    assert namespaces <= {package.replace("-", "_")}
    assert bool(namespaces) == (package in noxfile.KERNEL_PACKAGES)


def test_version_is_that_of_the_wheel(package):
    ((installed, stated),) = imported(package)["versions"]
    assert installed == stated


def test_public_names_exist(package):
    """Each is read, one by one and with a star."""
    assert imported(package)
