"""``help`` shows what a caller writes: no type that nothing has, and no name of a union."""

import importlib
import inspect

import pytest

MODULES = [
    "blocksparse_attn",
    "flash_attn_triton",
    "flash_attn_triton.distributed",
    "lightning_attn",
    "lightning_attn.distributed",
    "lightning_attn.fla",
    "nki_paged_attn",
    "prefix_prefill",
    "prefix_prefill.distributed",
]


@pytest.mark.parametrize("module", MODULES)
def test_signatures_show_no_noreturn_and_no_alias(module):
    names = vars(importlib.import_module(module))
    public = [names[n] for n in names.get("__all__", names) if not n.startswith("_")]
    own = module.partition(".")[2]
    functions = [x for x in public if inspect.isfunction(x) and x.__module__.endswith(own)]
    assert functions
    for function in functions:
        shown = str(inspect.signature(function))
        assert not any(word in shown for word in ("NoReturn", "Result", "Unpack", "Pair")), shown
