"""vLLM's engine on these kernels, on the CPU: tokens equal to those of transformers."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .._linked.tiers import INTERPRETED
from . import _vllm

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.eager,
    pytest.mark.skipif(
        not _vllm.IS_REAL or importlib.util.find_spec("xgrammar") is None,
        reason="vLLM and what its engine needs are not installed: nox -s vllm",
    ),
    pytest.mark.skipif(INTERPRETED, reason="an engine takes minutes in the interpreter"),
]


def serve(folder: Path, **asked: Any) -> subprocess.CompletedProcess[str]:
    """Run the engine in a process of its own, on the platform of ``_vllm_platform``."""
    plugin = folder / "site"
    info = plugin / "engine_platform-0.dist-info"
    info.mkdir(parents=True)
    (plugin / "engine_platform.py").write_text((HERE / "_vllm_platform.py").read_text())
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: engine-platform\nVersion: 0\n")
    entry = "[vllm.platform_plugins]\nengine = engine_platform:platform\n"
    (info / "entry_points.txt").write_text(entry)
    paths = [str(plugin), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "prefix_prefill,engine",
    }
    script = [sys.executable, str(HERE / "_vllm_engine.py"), str(folder / "model")]
    return subprocess.run(
        [*script, json.dumps(asked)], env=environment, capture_output=True, text=True, timeout=600
    )


def test_tokens_are_those_of_transformers(tmp_path):
    done = serve(tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == found["wanted"]
    assert len({x for tokens in found["tokens"] for x in tokens}) > 10


def test_a_cache_with_a_scale_of_each_token(tmp_path):
    """Rounded to 8 bits, so that a later token may be another."""
    done = serve(tmp_path, kv_cache_dtype="int8_per_token_head")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert [x[0] for x in found["tokens"]] == [x[0] for x in found["wanted"]]


def test_what_is_not_served_stops_the_start_by_name(tmp_path):
    done = serve(tmp_path, kv_cache_dtype="nvfp4")
    assert done.returncode != 0
    assert "PREFIX_PREFILL is not valid" in done.stderr
    assert "kv_cache_dtype not supported" in done.stderr
