"""Where the kernel runs: a Neuron device, AWS's simulator, or the one of this package."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..sim import Loader, simulate
from ..sim.targets import default_target, find_target

VARIABLE = "NKI_PAGED_ATTN_BACKEND"
BACKENDS = ("auto", "nki", "nki-sim", "sim")
DEVICE = Path("/dev/neuron0")
INSTALL = (
    "install AWS's nki (0.6 or newer), which kernels are written for: "
    'pip install "neuronx-cc==2.*" "nki>=0.6" '
    "--extra-index-url https://pip.repos.neuron.amazonaws.com"
)


def has_module(name: str) -> bool:
    """Return whether a module can be imported, without importing it; the simulator is not nki."""
    if name in sys.modules:
        found = sys.modules[name]
        return found is not None and not getattr(found, "is_simulator", False)
    return importlib.util.find_spec(name) is not None


def choose_backend(backend: str = "auto") -> str:
    """Return ``nki``, ``nki-sim`` or ``sim``.

    ``auto`` takes the value of ``NKI_PAGED_ATTN_BACKEND``; else a device, if nki and a device are
    there; else AWS's simulator, if nki is; else the simulator of this package. An environment with
    neuronx-cc's old namespace and without nki raises, so that no call falls back unnoticed.
    """
    chosen = os.environ.get(VARIABLE, "auto") if backend == "auto" else backend
    if not isinstance(chosen, str) or chosen not in BACKENDS:
        named = "backend" if backend != "auto" else VARIABLE
        raise ValueError(f"{named} must be one of {', '.join(BACKENDS)}, got {chosen!r}")
    if chosen == "sim":
        return chosen
    if has_module("nki"):
        if chosen != "auto":
            return chosen
        return "nki" if DEVICE.exists() else "nki-sim"
    if chosen != "auto":
        raise ImportError(f"backend {chosen!r} needs the package nki; {INSTALL}")
    if has_module("neuronxcc"):
        raise ImportError(
            "neuronx-cc is installed without nki, and its own namespace neuronxcc.nki is refused "
            f"by the compiler since NKI 0.4; {INSTALL}; or choose the simulator of this package "
            f"with backend='sim' or {VARIABLE}=sim"
        )
    return "sim"


def find_programs() -> int:
    """Return the cores of a logical NeuronCore: ``NEURON_LOGICAL_NC_CONFIG``, else the target's.

    Neuron's runtime and compiler group two cores on trn2 and newer, unless they are told otherwise
    (page about-neuron/arch/neuron-features/logical-neuroncore-config).
    """
    target = find_target(default_target())
    programs = os.environ.get("NEURON_LOGICAL_NC_CONFIG", str(target.programs))
    if programs not in ("1", "2") or int(programs) > target.programs:
        allowed = " or ".join(map(str, range(1, target.programs + 1)))
        raise ValueError(
            f"NEURON_LOGICAL_NC_CONFIG must be {allowed} on {target.name}, got {programs!r}"
        )
    return int(programs)


# the file of the kernel, and its entry
FILE, ENTRY = "form", "paged_attention_form"


@lru_cache(maxsize=1)
def simulated_kernel() -> Any:
    """Return the kernel with the simulator of this package as its ``nki``."""
    return getattr(Loader(Path(__file__).parent.parent / "_kernels").load(FILE), ENTRY)


def load_kernel() -> Any:
    """Return the kernel with the installed ``nki``."""
    return getattr(importlib.import_module(f".._kernels.{FILE}", __package__), ENTRY)


def run(backend: str, arguments: dict[str, Any]) -> Any:
    """Run the kernel on a backend that ``choose_backend`` returned."""
    programs = find_programs()
    if backend == "sim":
        kernel = simulated_kernel()[programs]
        # the tests run it strictly
        return simulate(kernel, default_target(), strict=False)(**arguments)
    kernel = load_kernel()[programs]
    if backend == "nki-sim":
        return importlib.import_module("nki").simulate(kernel)(**arguments)
    return kernel(**arguments)
