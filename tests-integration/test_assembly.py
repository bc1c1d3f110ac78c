"""What counts as a difference between the assembly of two builds."""

import sys

import pytest

from .conftest import ROOT

sys.path.insert(0, str(ROOT / "ci"))
import assembly

PTX = """
.version 8.8
.visible .entry walk(
	.param .u64 walk_param_0,
	.param .u32 walk_param_1
)
{
	.reg .b32 	%r<9>;
	.loc	1 20 3
	ld.param.b64 	%rd1, [walk_param_0];
	ld.param.b32 	%r3, [walk_param_1];
	add.s32 	%r4, %r3, %r5;   // a comment
$L__BB0_2:
	call.uni scale, (%r4);
	@%p1 bra 	$L__BB0_2;
	st.global.b32 	[ %rd1 + 0 ], %r4;
	ret;
}
	.section	.debug_str
"""
AMD = """
	.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
	.type	walk,@function
walk:
	s_load_dwordx2 s[4:5], s[0:1], 0x10
	s_load_dword s6, s[4:5], 0x8
	v_add_u32_e32 v1, s6, v2
	s_mov_b64 s[0:1], s[4:5]
	s_load_dword s7, s[0:1], 0x4
.LBB0_1:
	s_endpgm
"""
NAME = "3.9.0/flash-attn-triton/test_aot.py_test_builds_d64_-walk-0.ptx"


def compare(old: str, new: str, name: str = NAME) -> tuple[list[str], int]:
    return assembly.compare({NAME: old}, {name: new})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("walk", "another_walk"),
        ("scale", "scale"),
        ("$L__BB0_2", "$L__BB0_7"),
        (".loc	1 20 3", ".loc	2 33 1"),
        ("// a comment", "// another"),
        (".debug_str", ".debug_abbrev"),
        ("%r4", "%r8"),  # wherever it stands
        ("walk_param_1", "walk_param_7"),
        (
            "	.param .u32 walk_param_1\n",
            "	.param .u64 walk_param_1,\n	.param .u32 walk_param_2\n",
        ),
    ],
)
def test_no_difference_in_ptx(old, new):
    assert compare(PTX, PTX.replace(old, new)) == (
        ["1 pairs of builds, 0 differences, 0 load elsewhere"],
        0,
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("add.s32", "sub.s32"),
        ("%r3, %r5", "%r5, %r3"),
        ("%r5;", "%r3;"),
        ("%r<9>", "%r<10>"),
        ("	ret;\n", "	bar.sync 0;\n	ret;\n"),
        ("%rd1 + 0", "%rd1 + 4"),
    ],
)
def test_a_difference_in_ptx(old, new):
    changed = PTX.replace(old, new)
    assert changed != PTX
    told, found = compare(PTX, changed)
    assert found == 1
    assert told[0] == f"DIFFERS {NAME}"


def test_it_shows_counts_and_the_first_lines_that_differ():
    """Of registers without that which a load of a parameter fills."""
    told, _ = compare(
        PTX, PTX.replace("	ret;\n", "	bar.sync 0;\n").replace("%r<9>", "%r<12>")
    )
    assert told[1:] == [
        "    7 instructions, registers {'r': 9} | 7 instructions, registers {'r': 12}",
        "    .reg .b32 	%r<8>; | .reg .b32 	%r<11>;",
        "    ret; | bar.sync 0;",
        "1 pairs of builds, 1 differences, 0 load elsewhere",
    ]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ("0x10", "0x28", 0),
        ("s6", "s5", 1),  # a register of its own no more
        ("s6", "s3", 0),
        ("v1", "v99", 1),  # as many registers, the highest has to be the same
        ("s[4:5], 0x8", "s[4:5], 0x80", 1),
        ("0x4\n", "0x40\n", 1),  # parameters lie there no more
        ("v_add", "v_sub", 1),
    ],
)
def test_differences_on_amd(old, new, found):
    assert compare(AMD, AMD.replace(old, new))[1] == found


def test_loads_of_parameters_may_stand_elsewhere():
    load = "	ld.param.b32 	%r3, [walk_param_1];\n"
    moved = PTX.replace(load, "").replace("{\n", "{\n" + load)
    more = PTX.replace(load, load + "	ld.param.b32 	%r7, [walk_param_2];\n").replace(
        "<9>", "<10>"
    )
    for other in (moved, more):
        told, found = compare(PTX, other)
        assert told[0] == f"loads of parameters {NAME}"
        assert not found


def test_builds_of_other_names():
    """A renamed kernel, and a renamed test; where tests stand is not in the names."""
    for name in (NAME.replace("walk", "steps"), NAME.replace("aot.py", "builds.py")):
        assert compare(PTX, PTX, name)[1] == 0
    changed = PTX.replace("add", "sub")
    assert compare(PTX, changed, NAME.replace("walk", "steps"))[1] == 1
    assert compare(PTX, changed, NAME.replace("aot.py", "builds.py"))[1] == 2
    assert compare(PTX, PTX, NAME.replace("3.9", "3.6"))[1] == 2


def test_a_missing_build_is_a_difference(tmp_path):
    for side, count in (("old", 2), ("new", 1)):
        for n in range(count):
            path = tmp_path / side / NAME.replace("-0", f"-{n}")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(PTX)
    old, new = (assembly.builds(tmp_path / side) for side in ("old", "new"))
    assert assembly.compare(old, new)[1] == assembly.compare(new, old)[1] == 1
    assert assembly.compare(old, old)[1] == 0
    assert assembly.compare({}, {})[1] == 1
