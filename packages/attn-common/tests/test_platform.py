"""Platforms, with none of them present: torch's answers are replaced."""

import re
import sys
import timeit
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attn_common import Platform, detect, has_gluon
from attn_common import platform as module

KIB = 1024
# name: shared memory of a block in KiB, FP8, and the properties that hold
FACTS = {
    "nvidia:sm_75": (64, False, set()),
    "nvidia:sm_80": (163, False, set()),
    "nvidia:sm_86": (99, False, set()),
    "nvidia:sm_87": (163, False, set()),
    "nvidia:sm_89": (99, True, set()),
    "nvidia:sm_90": (227, True, {"is_hopper"}),
    "nvidia:sm_100": (227, True, {"is_blackwell"}),
    "nvidia:sm_103": (227, True, {"is_blackwell"}),
    "nvidia:sm_120": (99, True, set()),
    "nvidia:sm_121": (99, True, set()),
    "amd:gfx90a": (64, False, {"is_cdna"}),
    "amd:gfx942": (64, True, {"is_cdna"}),
    "amd:gfx950": (160, True, {"is_cdna"}),
    "amd:gfx1030": (64, False, {"is_rdna"}),
    "amd:gfx1100": (64, False, {"is_rdna"}),
    "amd:gfx1201": (64, True, {"is_rdna"}),
    "neuron:trn1": (0, False, set()),
    "neuron:trn2": (0, True, set()),
    "neuron": (0, False, set()),
    "cpu": (0, True, set()),
    # not known: the most careful row, never an error
    "nvidia:sm_70": (64, False, set()),
    "nvidia:sm_999": (64, True, set()),
    "amd:gfx1250": (64, False, set()),
}
CUDA = {name: name.partition(":")[2] for name in FACTS if name.startswith(("nvidia", "amd"))}


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("ATTN_COMMON_PLATFORM", raising=False)
    detect.cache_clear()
    yield
    detect.cache_clear()


@pytest.fixture
def machine(monkeypatch):
    """Give torch GPUs of the named platforms, and count how often it is asked about them."""

    def install(*names):
        asked = []

        def properties(index):
            asked.append(index)
            arch = CUDA[names[index]]
            if arch.startswith("gfx"):
                return SimpleNamespace(major=9, minor=4, gcnArchName=f"{arch}:sramecc+:xnack-")
            return SimpleNamespace(major=int(arch[3:-1]), minor=int(arch[-1]))

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(names))
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        hip = "6.4" if names and names[0].startswith("amd") else None
        monkeypatch.setattr(torch.version, "hip", hip)
        return asked

    return install


@pytest.fixture
def files(monkeypatch):
    """Replace the two paths by which a Neuron machine is known."""

    def install(product):
        def exists(self):
            return product is not None and str(self) == "/dev/neuron0"

        def read_text(self):
            if not product:
                raise FileNotFoundError(self)
            return product

        monkeypatch.setattr(module, "Path", type("FakePath", (type(Path()),), {}))
        monkeypatch.setattr(module.Path, "exists", exists)
        monkeypatch.setattr(module.Path, "read_text", read_text)

    return install


@pytest.mark.parametrize("name", FACTS)
def test_facts_of_a_platform(name):
    platform = Platform.parse(name)
    shared, fp8, holds = FACTS[name]
    assert str(platform) == name
    assert platform.shared_memory_per_block == shared * KIB
    assert platform.supports_fp8 is fp8
    properties = ("is_hopper", "is_blackwell", "is_cdna", "is_rdna")
    assert {p for p in properties if getattr(platform, p)} == holds


@pytest.mark.parametrize(
    ("text", "platform"),
    [
        ("nvidia:sm_90a", Platform("nvidia", "sm_90")),
        ("nvidia:sm_100f", Platform("nvidia", "sm_100")),
        ("amd:gfx942:sramecc+:xnack-", Platform("amd", "gfx942")),
    ],
)
def test_parse_drops_what_is_no_architecture(text, platform):
    assert Platform.parse(text) == platform


@pytest.mark.parametrize("arch", ["", "sm_", "gfx942", "unknown"])
def test_an_arch_that_is_not_known_has_no_fp8(arch):
    assert Platform("nvidia", arch).supports_fp8 is False


def test_feature_suffix_does_not_hide_fp8():
    assert Platform("nvidia", "sm_90a").supports_fp8 is True
    assert Platform("nvidia", "sm_80").supports_fp8 is False


@pytest.mark.parametrize("vendor", ["", "intel", None, "NVIDIA"])
def test_unknown_vendor_is_refused_at_construction(vendor):
    message = f"platform: vendor must be one of nvidia, amd, neuron, cpu, got {vendor!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Platform(vendor, "sm_90")


@pytest.mark.parametrize("text", [None, 90, b"cpu"])
def test_parse_takes_text_only(text):
    with pytest.raises(TypeError, match=f"^platform: must be a str, got {type(text).__name__}$"):
        Platform.parse(text)


def test_platforms_are_keys():
    assert {Platform.parse("cpu"): 1}[Platform("cpu")] == 1
    with pytest.raises(AttributeError):
        Platform("cpu").arch = "sm_90"


@pytest.mark.parametrize("text", ["", "intel:xe2", "sm_90", "NVIDIA:sm_90"])
def test_unknown_vendor(text):
    message = f"platform: vendor must be one of nvidia, amd, neuron, cpu, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Platform.parse(text)


@pytest.mark.parametrize(
    ("vendor", "arch"),
    [
        ("nvidia", ""),
        ("nvidia", "90"),
        ("nvidia", "gfx942"),
        ("amd", ""),
        ("amd", "sm_90"),
        ("cpu", "x86"),
        ("neuron", "sm_90"),
    ],
)
def test_unknown_arch(vendor, arch):
    text = f"{vendor}:{arch}"
    message = f"platform: {vendor} does not have an arch {arch!r}, got {text!r}"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Platform.parse(text)


@pytest.mark.parametrize("name", CUDA)
def test_a_gpu_is_detected(name, machine, files):
    machine(name)
    files(None)
    platform = Platform.parse(name)
    assert detect() == platform
    assert detect("cuda") == platform
    assert detect("cuda:0") == platform
    assert detect(torch.device("cuda", 0)) == platform


def test_two_gpus_of_one_machine_are_told_apart(machine):
    machine("nvidia:sm_80", "nvidia:sm_90")
    assert detect(torch.device("cuda", 1)) == Platform("nvidia", "sm_90")
    assert detect(torch.device("cuda", 0)) == Platform("nvidia", "sm_80")


def test_a_cpu_tensor_is_cpu_beside_a_gpu_too(machine):
    asked = machine("nvidia:sm_90")
    assert detect(torch.empty(1).device) == Platform("cpu")
    assert detect("cpu") == Platform("cpu")
    assert asked == []


def test_the_machine_is_asked_once(machine):
    asked = machine("nvidia:sm_90")
    device = torch.device("cuda", 0)
    assert {detect(device) for _ in range(10)} == {Platform("nvidia", "sm_90")}
    assert asked == [0]


def test_detect_costs_under_a_microsecond_after_the_first_call(machine):
    machine("nvidia:sm_90")
    device = torch.device("cuda", 0)
    detect(device)
    # the best of many short rounds, so that a busy machine does not decide
    rounds = timeit.repeat(lambda: detect(device), number=1000, repeat=50)
    assert min(rounds) / 1000 < 1e-6


def test_torch_compile_traces_through_it(machine):
    machine("nvidia:sm_90")
    device = torch.device("cuda", 0)
    detect(device)
    machine()  # torch.compile asks about GPUs itself

    def scaled(x):
        return x * 2 if detect(device).supports_fp8 and detect(x.device).vendor == "cpu" else x

    compiled = torch.compile(scaled, fullgraph=True, dynamic=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


def test_torch_compile_takes_the_answer_about_gluon(monkeypatch):
    """Also where nobody has asked before."""
    monkeypatch.setattr(module, "_GLUON", [])
    compiled = torch.compile(lambda x: x * (2 + has_gluon()), fullgraph=True, backend="eager")
    got = compiled(torch.ones(3))
    assert torch.equal(got, torch.full((3,), 2.0 + has_gluon()))


def test_no_accelerator_is_cpu(machine, files):
    machine()
    files(None)
    assert detect() == Platform("cpu")


def test_no_torch_is_cpu(monkeypatch, files):
    monkeypatch.setitem(sys.modules, "torch", None)
    files(None)
    assert detect() == Platform("cpu")
    assert detect("cpu") == Platform("cpu")


@pytest.mark.parametrize(
    ("product", "arch"),
    [("trn1.32xlarge\n", "trn1"), ("trn2.48xlarge\n", "trn2"), ("inf2.xlarge\n", "inf2")]
    + [("HVM domU\n", ""), ("", "")],
)
def test_neuron_is_detected(product, arch, machine, files):
    machine()
    files(product)
    assert detect() == Platform("neuron", arch)
    assert detect("neuron:0") == Platform("neuron", arch)
    assert detect("xla:0") == Platform("neuron", arch)


@pytest.mark.parametrize("device", ["mps", "xpu:0", torch.device("meta")])
def test_other_devices_are_refused_by_name(device):
    message = f"detect: device must be cpu, cuda, neuron or xla, got {device}"
    with pytest.raises(ValueError, match=f"^{message}$"):
        detect(device)


def test_the_override_answers_for_every_device(monkeypatch, machine):
    asked = machine("nvidia:sm_90")
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "amd:gfx942")
    for device in (None, "cpu", "cuda:0", torch.device("cpu")):
        assert detect(device) == Platform("amd", "gfx942")
    assert asked == []


def test_the_override_is_read_again_after_cache_clear(monkeypatch):
    assert detect("cpu") == Platform("cpu")
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "amd:gfx942")
    assert detect("cpu") == Platform("cpu")
    detect.cache_clear()
    assert detect("cpu") == Platform("amd", "gfx942")


def test_an_empty_override_is_none(monkeypatch):
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "")
    assert detect("cpu") == Platform("cpu")


def test_a_wrong_override_is_an_error_at_the_call(monkeypatch):
    monkeypatch.setenv("ATTN_COMMON_PLATFORM", "gfx942")
    with pytest.raises(ValueError, match="vendor must be one of"):
        detect("cpu")


@pytest.mark.parametrize(
    "answer",
    [object(), None, ModuleNotFoundError("no triton")],
    ids=["there", "missing", "no triton"],
)
def test_gluon_is_looked_for_once(answer, monkeypatch):
    asked = []

    def find_spec(name):
        asked.append(name)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "_GLUON", [])
    monkeypatch.setattr(module.importlib.util, "find_spec", find_spec)
    expected = answer is not None and not isinstance(answer, Exception)
    assert (has_gluon(), has_gluon()) == (expected, expected)
    assert asked == ["triton.experimental.gluon.nvidia.hopper"]
