"""The accelerator of a tensor. Importing this module looks at no hardware."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

if TYPE_CHECKING:
    import torch

Vendor = Literal["nvidia", "amd", "cpu", "neuron"]

OVERRIDE = "ATTN_COMMON_PLATFORM"
# the text after the vendor; NVIDIA's feature suffix (sm_90a) and AMD's flags are dropped
_ARCH = {
    "nvidia": r"(sm_\d{2,3})[af]?",
    "amd": r"(gfx[0-9a-f]{3,4})(?::[a-z0-9+-]+)*",
    "neuron": r"((?:trn|inf)\d+)?",
    "cpu": r"()",
}
_RDNA = re.compile(r"gfx(10|11|120)[0-9a-f]+")
_SHARED_KIB = {"sm_80": 163, "sm_87": 163, "sm_86": 99, "sm_89": 99, "sm_120": 99, "sm_121": 99}
_SHARED_KIB |= {"sm_90": 227, "sm_100": 227, "sm_103": 227, "gfx950": 160}
CDNA3 = ("gfx940", "gfx941", "gfx942")


@dataclass(frozen=True)
class Platform:
    """A vendor and an ``arch`` such as ``sm_90``, ``gfx942``, ``trn2``; ``""``: CPU or unknown."""

    vendor: Vendor
    arch: str = ""

    def __post_init__(self) -> None:
        if self.vendor not in _ARCH:
            raise ValueError(
                f"platform: vendor must be one of {', '.join(_ARCH)}, got {self.vendor!r}"
            )

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Read ``"nvidia:sm_90"``, ``"amd:gfx942"``, ``"neuron:trn2"`` or ``"cpu"``."""
        if not isinstance(text, str):
            raise TypeError(f"platform: must be a str, got {type(text).__name__}")
        vendor, _, arch = text.partition(":")
        if vendor not in _ARCH:
            raise ValueError(f"platform: vendor must be one of {', '.join(_ARCH)}, got {text!r}")
        match = re.fullmatch(_ARCH[vendor], arch)
        if match is None:
            raise ValueError(f"platform: {vendor} does not have an arch {arch!r}, got {text!r}")
        return cls(cast("Vendor", vendor), match[1] or "")

    def __str__(self) -> str:
        return f"{self.vendor}:{self.arch}" if self.arch else self.vendor

    @property
    def is_hopper(self) -> bool:
        return self.arch == "sm_90"

    @property
    def is_blackwell(self) -> bool:
        """Data-centre Blackwell, with tensor memory; sm_120 is a smaller design."""
        return self.arch in ("sm_100", "sm_103")

    @property
    def is_cdna(self) -> bool:
        return self.arch in ("gfx908", "gfx90a", *CDNA3, "gfx950")

    @property
    def is_rdna(self) -> bool:
        return _RDNA.fullmatch(self.arch) is not None

    @property
    def supports_fp8(self) -> bool:
        """Whether matrix units read FP8; True for the CPU, which emulates it."""
        if self.vendor == "nvidia":
            known = re.fullmatch(_ARCH["nvidia"], self.arch)
            return known is not None and int(known[1].removeprefix("sm_")) >= 89
        if self.vendor == "amd":
            return self.arch in (*CDNA3, "gfx950", "gfx1200", "gfx1201")
        return self.vendor == "cpu" or self.arch not in ("", "trn1", "inf1", "inf2")

    @property
    def shared_memory_per_block(self) -> int:
        """Bytes that one block may use; 64 KiB for unknown GPUs, 0 if not a GPU."""
        return 1024 * _SHARED_KIB.get(self.arch, 64) if self.vendor in ("nvidia", "amd") else 0


def detect(device: torch.device | str | None = None) -> Platform:
    """Return the platform of a device; ``ATTN_COMMON_PLATFORM`` overrides it for every device.

    ``None`` is the first accelerator of the machine, else the CPU; a device without an index is the
    first of its kind. Answers are cached: the variable is read at the first call for a device, and
    again after ``detect.cache_clear()``.
    """
    found = _FOUND.get(device)
    if found is None:
        found = _FOUND[device] = _look(device)
    return found


# not functools.cache: torch.compile traces through it, warns, and looks at the machine each time
_FOUND: dict[torch.device | str | None, Platform] = {}
detect.cache_clear = _FOUND.clear  # type: ignore[attr-defined]


def has_gluon() -> bool:
    """Return whether Triton has Gluon, its lower-level language, for Hopper; imports Triton."""
    if not _GLUON:
        try:
            found = importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper")
        except ImportError:  # a parent module is missing
            found = None
        _GLUON.append(found is not None)
    return _GLUON[0]


# the cached answer; not functools.cache, as above
_GLUON: list[bool] = []
# torch.compile cannot trace the search but may take its answer as a constant; this attribute is
# what ``torch.compiler.assume_constant_result`` sets, without its import of the compiler
has_gluon._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _look(device: torch.device | str | None) -> Platform:
    if override := os.environ.get(OVERRIDE):
        return Platform.parse(override)
    kind, _, index = ("" if device is None else str(device)).partition(":")
    if kind == "cpu":
        return Platform("cpu")
    if kind in ("neuron", "xla"):
        return Platform("neuron", _neuron_arch())
    if kind not in ("", "cuda"):
        raise ValueError(f"detect: device must be cpu, cuda, neuron or xla, got {device}")
    return _cuda_platform(int(index or 0)) if kind else _first_platform()


def _first_platform() -> Platform:
    with contextlib.suppress(ImportError):
        import torch

        if torch.cuda.is_available():
            return _cuda_platform(0)
    return Platform("neuron", _neuron_arch()) if Path("/dev/neuron0").exists() else Platform("cpu")


def _cuda_platform(index: int) -> Platform:
    import torch

    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Platform("amd", properties.gcnArchName.split(":")[0])
    return Platform("nvidia", f"sm_{properties.major}{properties.minor}")


def _neuron_arch() -> str:
    """Return the family of the instance type in the firmware: trn2 for ``trn2.48xlarge``."""
    product = ""
    with contextlib.suppress(OSError):
        product = Path("/sys/devices/virtual/dmi/id/product_name").read_text()
    return product[:4] if re.match(r"(trn|inf)\d", product) else ""
