"""What is measured: patterns, densities, block sizes, decode."""

from __future__ import annotations

from dataclasses import dataclass, replace

FAMILIES = ("pattern", "dense", "small", "curve", "decode", "build", "host")
DENSITIES = (1.0, 0.7, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02)


@dataclass(frozen=True)
class Case:
    """One problem and one pass; bf16, causal, grouped heads."""

    family: str
    seqlen: int
    block: int
    way: str = "fwd"  # or "bwd"
    local: int = 0  # of the local and strided pattern; 0: a random one
    stride: int = 0
    density: float = 1.0  # of a random pattern; rows in pairs of 128 positions are alike
    heads_q: int = 32
    heads_k: int = 8
    head_dim: int = 128
    batch: int = 1
    seqlen_q: int = 0  # 0: as many as keys
    homo: bool = False

    @property
    def name(self) -> str:
        kind = f"local{self.local}-stride{self.stride}" if self.local else f"d{self.density:g}"
        homo = "-homo" if self.homo else ""
        text = f"{self.family}-b{self.batch}-s{self.seqlen}-block{self.block}-{kind}{homo}"
        return f"{text}-{self.way}"

    def shrunk(self) -> Case:
        """The same at a size that a CPU can do."""
        return replace(
            self,
            seqlen=256,
            heads_q=4,
            heads_k=2,
            head_dim=16,
            batch=min(self.batch, 2),
            block=min(self.block, 32),
            local=min(self.local, 2),
            stride=min(self.stride, 3),
        )


PATTERNS = ((16, 8), (8, 16))


def everything() -> list[Case]:
    cases = []
    for seqlen in (8192, 32768):
        for local, stride in PATTERNS:
            for homo in (False, True):
                for way in ("fwd", "bwd"):
                    cases.append(Case("pattern", seqlen, 64, way, local, stride, homo=homo))
    for seqlen in (8192, 32768):
        cases += [Case("dense", seqlen, 64, way) for way in ("fwd", "bwd")]
    # the same shape of pattern in smaller blocks: so many times the blocks, or local ones
    for block in (16, 32, 128):
        scale = 64 / block
        for way in ("fwd", "bwd"):
            cases.append(Case("small", 8192, block, way, round(16 * scale), 8))
    for local, stride in PATTERNS:
        cases.append(Case("decode", 8192, 64, "fwd", local, stride, batch=32, seqlen_q=1))
    for block in (64, 128):
        for density in DENSITIES:
            cases += [Case("curve", 8192, block, way, density=density) for way in ("fwd", "bwd")]
    return cases


def select(families: list[str], parts: list[str], dry_run: bool) -> list[Case]:
    """Return the cases of some families whose names hold one of some parts."""
    chosen = [
        case
        for case in everything()
        if case.family in families and (not parts or any(part in case.name for part in parts))
    ]
    if not dry_run:
        return chosen
    # one of each kind is enough
    kinds = {(case.family, case.way, case.homo): case.shrunk() for case in reversed(chosen)}
    return list(kinds.values())
