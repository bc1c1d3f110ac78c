"""Kernels that are compiled in one place and launched in another."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import struct
import subprocess
import sys
import types
from unittest import mock

import pytest
import torch

PACKAGES = ["blocksparse_attn", "flash_attn_triton", "lightning_attn", "prefix_prefill"]
GPU = "sm_90"
TENSOR = "bfloat16", [2, 64, 2, 32]
# kernels that compile quickly; their launches are those of any others
CALLS = {
    "flash_attn_triton": ("flash_attn_func", dict.fromkeys("qkv", TENSOR)),
    "prefix_prefill": (
        "reshape_and_cache",
        {
            **{x: ("bfloat16", [9, 2, 32]) for x in "kv"},
            **{f"{x}_cache": ("bfloat16", [4, 16, 2, 32]) for x in "kv"},
            "slot_mapping": ("int64", [9]),
        },
    ),
}


def module(package, name):
    return importlib.import_module(f"{package}._linked.launch.{name}")


def compiled(package, folder, *arguments, **call):
    """Run the command in a process of its own, which has the platform that it asks for."""
    function, given = CALLS[package]
    calls = folder.parent / "calls.jsonl"
    calls.write_text(json.dumps({"function": function, "arguments": given} | call) + "\n")
    command = [sys.executable, "-m", package, "compile", f"--gpu={GPU}", f"--out={folder}"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return subprocess.run(
        [*command, *(arguments or (f"--calls={calls}",))],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )


@pytest.fixture(scope="module", params=CALLS)
def shipped(request, tmp_path_factory):
    """Return a package and a folder of its kernels."""
    folder = tmp_path_factory.mktemp("kernels") / GPU
    ran = compiled(request.param, folder)
    assert ran.returncode == 0, ran.stderr
    return request.param, folder


def test_a_folder_says_what_its_kernels_need(shipped):
    package, folder = shipped
    held = json.loads((folder / "manifest.json").read_text())
    assert held["build"]["package"] == package
    assert held["build"]["version"] == importlib.import_module(package).__version__
    assert held["build"]["gpu"] == GPU
    assert held["kernels"]
    for entry in held["kernels"].values():
        code = (folder / entry["code"]).read_bytes()
        assert code[:4] == b"\x7fELF"
        assert b".debug_line" not in code
        kinds = [kind for _, kind in entry["parameters"]]
        assert kinds.count("map") == len(entry["maps"])
        assert {*kinds} <= {"pointer", "i32", "i64", "fp32", "map"}


def test_it_is_written_alike_again(shipped, tmp_path):
    package, folder = shipped
    assert compiled(package, tmp_path / GPU).returncode == 0
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in (tmp_path / GPU).iterdir()}
    for name in names:
        assert (folder / name).read_bytes() == (tmp_path / GPU / name).read_bytes()


def test_calls_are_added_to_a_folder(shipped):
    package, folder = shipped
    before = (folder / "manifest.json").read_text()
    ran = compiled(package, folder)
    assert "0 kernels compiled" in ran.stdout
    assert (folder / "manifest.json").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--like=llama-9",), "llama-3-8b"),
        (("--gpu=sm_75",), "sm_80"),
        (("--calls=nowhere",), "nowhere"),
    ],
)
def test_the_command_names_what_it_knows(arguments, told, tmp_path):
    ran = compiled("flash_attn_triton", tmp_path / GPU, *arguments)
    assert ran.returncode != 0
    assert told in ran.stderr


def test_a_call_that_is_none_is_refused(tmp_path):
    ran = compiled("flash_attn_triton", tmp_path / GPU, function="flash_attn")
    assert "a call must have a function of flash_attn_triton" in ran.stderr
    assert not (tmp_path / GPU).exists()


# ---- which folders are taken


@pytest.fixture
def found(shipped, tmp_path, monkeypatch):
    """Return a function that changes a copy of the folder, and gives what is made of it."""
    package, folder = shipped
    folders = module(package, "shipped.folders")
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setattr(folders, "find_spec", lambda _: types.SimpleNamespace(origin=None))
    build = json.loads((folder / "manifest.json").read_text())["build"]
    here = folders.Build(**build)

    def find(name="build", **changes):
        held = json.loads((folder / "manifest.json").read_text())
        (held if name == "manifest" else held["build"]).update(changes)
        (tmp_path / "manifest.json").write_text(json.dumps(held))
        monkeypatch.setattr(folders, "this_build", lambda gpu: here._replace(gpu=gpu))
        monkeypatch.setenv("ATTN_KERNELS", str(tmp_path))
        return folders.folders(GPU)

    find.package, find.folders, find.path = package, folders, tmp_path
    return find


def test_a_folder_of_this_build_is_taken(found):
    fitting, aside = found()
    assert [folder.path for folder in fitting] == [found.path]
    assert aside == []


@pytest.mark.parametrize("field", ["version", "files", "gpu", "triton"])
def test_a_folder_of_another_build_is_left_aside_with_a_line(found, field):
    fitting, (line,) = found(**{field: "another"})
    assert fitting == []
    assert str(found.path) in line
    assert field in line


def test_a_wheel_for_several_tritons_is_taken_in_silence(found):
    found()
    held = json.loads((found.path / "manifest.json").read_text())
    (found.path / "manifest.json").unlink()
    for name, triton in (("old", "3.0.0"), ("new", held["build"]["triton"])):
        build = held["build"] | {"triton": triton}
        (found.path / name).mkdir()
        (found.path / name / "manifest.json").write_text(json.dumps(held | {"build": build}))
    (folder,), aside = found.folders.folders(GPU)
    assert folder.path == found.path / "new"
    assert aside == []


def test_folders_of_other_packages_are_not_told_of(found):
    assert found(package="other") == ([], [])


def test_a_manifest_of_another_format_is_left_aside(found):
    fitting, (line,) = found("manifest", format=0)
    assert fitting == []
    assert "format 0" in line
    (found.path / "manifest.json").write_text("{")
    fitting, (line,) = found.folders.folders(GPU)
    assert "is no manifest" in line


def test_the_binding_is_asked_for_by_name(found, monkeypatch):
    monkeypatch.setattr(found.folders, "find_spec", lambda _: None)
    fitting, (line,) = found()
    assert fitting == []
    assert f"{found.package.replace('_', '-')}[kernels]" in line


def test_folders_in_a_folder_are_looked_into(shipped, tmp_path, monkeypatch):
    package, folder = shipped
    folders = module(package, "shipped.folders")
    monkeypatch.setenv("ATTN_KERNELS", f"{tmp_path}{os.pathsep}{folder.parent}")
    assert [*folders.candidates()] == [tmp_path, folder]


# ---- a launch


class Driver(types.ModuleType):
    """Stands in for CUDA's driver: keeps what it is asked to launch."""

    def __init__(self):
        super().__init__("driver")
        self.launched, self.sizes, self.contexts = [], [], [5]
        self.CUresult = types.SimpleNamespace(CUDA_ERROR_INVALID_CONTEXT=201)
        self.CUfunction_attribute = self.CUlaunchAttributeID = mock.MagicMock()
        self.CUlaunchConfig = self.CUlaunchAttribute = mock.MagicMock

    def cuCtxGetCurrent(self):
        return 0, self.contexts[-1]

    def cuCtxSetCurrent(self, context):
        self.contexts.append(context)
        return (0,)

    def cuModuleLoadData(self, code):
        return 0, code

    def cuModuleGetFunction(self, module, name):
        return 0, name

    def cuFuncSetAttribute(self, function, attribute, value):
        return (0,)

    def cuLaunchKernel(self, function, *numbers):
        if not self.contexts[-1]:
            return (201,)
        *numbers, _stream, where, _ = numbers
        addresses = (ctypes.c_void_p * len(self.sizes)).from_address(where)
        raw = [ctypes.string_at(a, n) for a, n in zip(addresses, self.sizes, strict=True)]
        self.launched.append((function, numbers, raw, list(addresses)))
        return (0,)


@pytest.fixture
def driver(monkeypatch):
    stand_in = Driver()
    cuda, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    cuda.bindings, bindings.driver = bindings, stand_in
    for name, value in (("", cuda), (".bindings", bindings), (".bindings.driver", stand_in)):
        monkeypatch.setitem(sys.modules, f"cuda{name}", value)
    for package in PACKAGES:
        monkeypatch.delitem(sys.modules, f"{package}._linked.launch.shipped.kernel", raising=False)
    yield stand_in
    for package in PACKAGES:
        sys.modules.pop(f"{package}._linked.launch.shipped.kernel", None)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_launch_packs_what_the_kernel_takes(name, driver):
    kernel = module(name, "shipped.kernel")
    kinds = ["pointer", "i32", "map", "i32", "i64", "fp32"]
    # the third argument is compiled in
    entry = {"symbol": "k", "shared": 64 * 1024, "threads": 384, "early": False, "maps": [{}]}
    entry |= {"parameters": [*zip((0, 1, 3, 4, 5, 6), kinds, strict=True)], "scratch": 2}
    one = kernel.Shipped(b"", entry)
    driver.sizes = [8, 4, 128, 4, 8, 4, 8, 8]
    encoded = bytes(range(128))
    for start in (2**40, 2**41):  # the buffer serves every launch
        given = start, -7, None, encoded, 2**31 - 1, -(2**40), 0.5
        one.run(9, 1, 1, 77, one.function, None, None, None, None, *given)
        function, numbers, raw, addresses = driver.launched[-1]
        assert function == b"k"
        assert numbers == [9, 1, 1, 384, 1, 1, 64 * 1024]
        want = struct.pack("<Q", start), struct.pack("<i", -7), encoded
        want += struct.pack("<i", 2**31 - 1), struct.pack("<q", -(2**40)), struct.pack("<f", 0.5)
        assert raw == [*want, bytes(8), bytes(8)]
        assert addresses[2] % 64 == 0
        assert all(a % n == 0 for a, n in zip(addresses, (8, 4, 64, 4, 8, 4, 8, 8), strict=True))


def test_a_thread_that_has_not_used_the_gpu_launches(driver):
    kernel = module("flash_attn_triton", "shipped.kernel")
    entry = {"symbol": "k", "shared": 0, "threads": 128, "early": False, "maps": [], "scratch": 0}
    one = kernel.Shipped(b"", entry | {"parameters": [(1, "i32")]})
    driver.sizes = [4]
    driver.contexts.append(None)
    one.run(9, 1, 1, 77, one.function, None, None, None, None, 3, 4)
    (launched,) = driver.launched
    assert launched[2] == [struct.pack("<i", 4)]
    assert driver.contexts == [5, None, 5]


def test_a_file_that_was_altered_is_refused(shipped, driver, tmp_path):
    package, folder = shipped
    kernel = module(package, "shipped.kernel")
    entry = next(iter(json.loads((folder / "manifest.json").read_text())["kernels"].values()))
    assert kernel.load(folder, entry).function == entry["symbol"].encode()
    code = (folder / entry["code"]).read_bytes()
    for wrong in (code[:-1], code + b"\0"):
        (tmp_path / entry["code"]).write_bytes(wrong)
        with pytest.raises(RuntimeError, match="its sha256 differs"):
            kernel.load(tmp_path, entry)


# prints the hash of each launch of a call
FORMS = """
import importlib, json, sys
linked = sys.argv[1] + "._linked.launch."
launches = importlib.import_module(linked + "compiler.command").launches_of(json.load(sys.stdin))
hash_of = importlib.import_module(linked + "shipped.folders").hash_of
print(*{hash_of(launch.form) for launch in launches})
"""


def test_a_form_is_the_same_in_every_process(shipped):
    package, folder = shipped
    function, arguments = CALLS[package]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", FORMS, package],
        input=json.dumps({"function": function, "arguments": arguments}),
        env=environment | {"ATTN_COMMON_PLATFORM": f"nvidia:{GPU}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    held = json.loads((folder / "manifest.json").read_text())["kernels"]
    assert {*ran.stdout.split()} == held.keys()


def test_what_is_shipped_is_found_by_its_form(shipped, driver, monkeypatch):
    package, folder = shipped
    folders = module(package, "shipped.folders")
    monkeypatch.setattr(folders, "_arch", lambda _: GPU)
    monkeypatch.setattr(folders, "_folders", lambda _: [folders.read(folder)])
    monkeypatch.setattr(folders, "hash_of", lambda form: form)
    for form in folders.read(folder).kernels:
        assert folders.find(form, torch.device("cuda", 0)).is_shipped
        assert folders.find(form, torch.device("cpu")) is None
    assert folders.find("another", torch.device("cuda", 0)) is None


def test_a_long_compilation_is_told_of_once(caplog):
    for package in PACKAGES:
        launches = module(package, "compiler.launches")
        launches._said.clear()
        for seconds in (0.1, 2.0, 3.0):
            launches.tell("forward_kernel", seconds)
        (record,) = [x for x in caplog.records if x.name == package]
        assert "forward_kernel in 2.0 s" in record.getMessage()
