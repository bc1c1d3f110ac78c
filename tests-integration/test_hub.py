"""Our packages as kernels of Hugging Face's library, loaded by that library."""

import importlib
import json
import os
import subprocess
import sys

import pytest

LOAD = """
import sys
from pathlib import Path
import torch
from kernels import get_local_kernel
"""
# a call of each package, as a function of its module
CALLS = {
    "blocksparse-attn": """
def call(m, x):
    layout = m.BlockSparseLayout(torch.tensor([[0, 1, 3]]), torch.tensor([[0, 0, 1]]), 16)
    return m.blocksparse_attn_func(x, x, x, layout)
""",
    "flash-attn-triton": "def call(m, x): return m.flash_attn_func(x, x, x, causal=True)",
    "lightning-attn": """
def call(m, x): return m.lightning_attn_func(x, x, x, torch.full((2,), 0.1))[0]
""",
    "prefix-prefill": """
def call(m, x):
    cache = x.view(2, 16, 2, 16)
    ints = [torch.tensor(n, dtype=torch.int32) for n in ([[0, 1]], [0, 32], [32])]
    return m.paged_attn_func(x[0], cache, cache, *ints, 32, 32)
""",
}
COMPARE = """
wheel, copies = __import__(sys.argv[1]), [get_local_kernel(Path(p)) for p in sys.argv[2:]]
assert len({m.__name__ for m in (wheel, *copies)}) == 1 + len(copies)
assert not any(m.__file__.startswith(str(Path(wheel.__file__).parent)) for m in copies)
x = torch.randn(1, 32, 2, 16, generator=torch.Generator().manual_seed(0))
results = []
for m in (wheel, *copies):
    leaf = x.clone().requires_grad_()
    out = call(m, leaf if sys.argv[1] != "prefix_prefill" else x)
    grad = torch.autograd.grad(out.sum(), leaf)[0] if out.requires_grad else x
    results.append((out.detach(), grad))
for out, grad in results[1:]:
    assert torch.equal(out, results[0][0])
    assert torch.equal(grad, results[0][1])
names = {n.split("::")[0] for n in torch._C._dispatch_get_all_op_names() if sys.argv[1] in n}
assert len(names) == 1 + len(copies), names
"""
TRANSFORMERS = """
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=99)
config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
tokens, mask = torch.randint(0, 99, (2, 17)), torch.ones(2, 17, dtype=torch.long)
mask[0, :5] = 0
with torch.no_grad():
    model.set_attn_implementation("eager")
    want = model(tokens, attention_mask=mask).logits[mask.bool()].float()
    model.set_attn_implementation("ours/flash-attn-triton")
    got = model(tokens, attention_mask=mask).logits[mask.bool()].float()
# bf16 has 8 bits: a few roundings on the way through two layers
assert (got - want).abs().max() <= 2**-5 * want.abs().max(), (got - want).abs().max()
assert any(name.startswith("_flash_attn_triton_cpu_") for name in sys.modules)
"""


def export(root, files, hub):
    command = [sys.executable, str(root / "ci" / "hub.py"), f"--files={files}", f"--hub={hub}"]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hub(root, noxfile, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    done = export(root, noxfile.DIST, folder)
    assert done.returncode == 0, done.stderr
    assert "nki-paged-attn is not exported" in done.stdout
    return folder


def run(code, *arguments, **environment):
    environment = os.environ | {"HF_HUB_OFFLINE": "1"} | environment
    command = [sys.executable, "-c", LOAD + code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("interpret", ["0", "1"], ids=["eager", "interpreted"])
@pytest.mark.parametrize("name", CALLS)
def test_a_wheel_and_two_copies_share_a_process(hub, name, interpret, tmp_path):
    # the second copy differs in a comment, as another version would in more
    again = tmp_path / name
    source = hub / name / "build" / "torch-cpu"
    target = again / "build" / "torch-cpu"
    for path in source.rglob("*"):
        if path.is_file():
            (target / path.relative_to(source)).parent.mkdir(parents=True, exist_ok=True)
            (target / path.relative_to(source)).write_bytes(path.read_bytes())
    metadata = json.loads((target / "metadata.json").read_text())
    (target / "metadata.json").write_text(json.dumps(metadata | {"id": metadata["id"] + "x"}))
    code = CALLS[name] + COMPARE
    run(code, name.replace("-", "_"), hub / name, again, TRITON_INTERPRET=interpret)


def test_transformers_loads_it_by_name(hub):
    folder = hub / "flash-attn-triton"
    run(TRANSFORMERS, TRITON_INTERPRET="0", LOCAL_KERNELS=f"ours/flash-attn-triton={folder}")


def test_a_copy_imports_nothing_of_a_wheel(hub):
    for path in hub.rglob("*.py"):
        assert "from attn_common import" not in path.read_text()
    assert {p.name for p in hub.iterdir()} == set(CALLS)


def test_the_id_is_that_of_the_content(root, noxfile, hub, tmp_path):
    assert export(root, noxfile.DIST, tmp_path).returncode == 0

    def ids(folder):
        found = sorted(folder.rglob("metadata.json"))
        return [json.loads(path.read_text())["id"] for path in found]

    assert ids(tmp_path) == ids(hub)
    assert len(set(ids(hub))) == 3 * len(CALLS)
    assert all(x.isidentifier() for x in ids(hub))


def test_what_is_no_export_is_not_deleted(root, noxfile, tmp_path):
    kept = tmp_path / "flash-attn-triton" / "thesis.txt"
    kept.parent.mkdir()
    kept.touch()
    done = export(root, noxfile.DIST, tmp_path)
    assert done.returncode == 1
    assert f"hub: {kept.parent} is no earlier export" in done.stderr
    assert kept.exists()


def test_an_absolute_import_that_stays_is_refused(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root / "ci"))
    hub = importlib.import_module("hub")
    moved = hub.inward("a/b.py", b"from attn_common import cdiv\n")
    assert moved == b"from .._attn_common import cdiv\n"
    for line in (b"import attn_common", b"from attn_common.fp8 import x"):
        with pytest.raises(ValueError, match=r"a/b\.py must import attn_common by"):
            hub.inward("a/b.py", line)
