"""Continuous batching of transformers: our pages beside the library's own paged SDPA.

    python benchmarks/bench_serving.py --json serving.json      on a GPU: a Llama of 1 B parameters
    python benchmarks/bench_serving.py --tiny                   anywhere: that the script runs

The weights are random, so what the model says means nothing; that ``generate_batch`` says the same
as ``generate``, token for token in fp32, means that pages, masks and positions are right. Where it
does not, nothing is timed. Then the speed in bf16: 64 requests with prompts of 64 to 1000 tokens
and 128 new tokens each. Every implementation runs with the manager kept: once to warm up, then in
turns with the others, and its median counts. FlashAttention-3 is one of them where transformers
finds its package. No run begins that is expected to end after ``--seconds``, counted from the
start, and the JSON is written after each. transformers has to be 5.17. One run from source:

    PYTHONPATH=packages/prefix-prefill/src:packages/attn-common/src python ...
"""

from __future__ import annotations

import argparse
import datetime
import json
import logging
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import prefix_prefill.integrations.transformers as paged
import torch
import transformers
import triton
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig

# that of Llama 3.2 1B, but for the vocabulary
LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
}


SDPA = "paged|sdpa"
# how steps are launched; without a GPU, and with one
GRAPHS = [["no"], ["no", "yes", "async"]]


def generation(tokens: int) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)


def draw(count: int, least: int, most: int, vocabulary: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.linspace(least, most, count).long()[torch.randperm(count, generator=generator)]
    return [
        torch.randint(8, vocabulary, (n,), generator=generator).tolist() for n in lengths.tolist()
    ]


def make(sizes: dict[str, int], device: str, dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, max_position_embeddings=4096, initializer_range=0.05, attn_implementation="sdpa"
    )
    with torch.device(device):
        return LlamaForCausalLM(config).to(dtype).eval()


def batching(page: int, pages: int, tokens: int, graphs: str) -> ContinuousBatchingConfig:
    return ContinuousBatchingConfig(
        block_size=page,
        num_blocks=pages,
        max_batch_tokens=tokens,
        use_cuda_graph=graphs != "no",
        use_async_batching=graphs == "async",
        # the second run would find the prompts of the first
        allow_block_sharing=False,
        kv_padding_interval_size=0 if graphs == "no" else 4096,
    )


def has_flash3() -> bool:
    """Say whether transformers finds the package of FlashAttention-3; nothing is downloaded."""
    from transformers.utils import is_flash_attn_3_available

    return torch.cuda.is_available() and bool(is_flash_attn_3_available())


def answers_of(model: Any, prompts: list[list[int]], tokens: int, config: Any) -> list[list[int]]:
    found = model.generate_batch(
        prompts,
        generation_config=generation(tokens),
        continuous_batching_config=config,
        persistent_manager=True,
        warmup=False,
    )
    wrong = [x.error for x in found.values() if x.error is not None]
    if wrong or len(found) != len(prompts):
        raise RuntimeError(f"{len(found)} of {len(prompts)} answers, errors {wrong[:1]}")
    return [list(x.generated_tokens) for x in found.values()]


def check(model: Any, name: str, graphs: list[str]) -> dict[str, int]:
    """Return how many greedy answers are those of ``generate``, token for token, by graphs."""
    prompts = draw(8, 3, 300, model.config.vocab_size, 1)
    want = []
    model.set_attn_implementation("sdpa")
    for prompt in prompts:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=generation(24)
        )
        want.append(out[0, len(prompt) :].tolist())
    model.set_attn_implementation(name)
    counts = {}
    for with_graphs in graphs:
        # several chunks a prompt, beside sequences that decode
        got = answers_of(model, prompts, 24, batching(16, 256, 128, with_graphs))
        model.destroy_cached_continuous_batching_manager()
        count = sum(a == b for a, b in zip(got, want, strict=True))
        print(
            f"fp32, graphs {with_graphs}: {count} of {len(want)} answers are those of generate",
            flush=True,
        )
        counts[with_graphs] = count
    return counts | {"of": len(want)}


class Measured:
    """One implementation: its name, how its graphs are made, its seconds."""

    def __init__(self, name: str, graphs: str) -> None:
        self.name, self.graphs = name, graphs
        self.seconds: list[float] = []
        self.tokens = 0
        self.took = 0.0  # the last run, its warm-up with it

    def run(self, model: Any, prompts: list[list[int]], tokens: int, config: Any) -> None:
        """Warm up, then time one more run; all that was kept for it is given back."""
        model.set_attn_implementation(self.name)
        answers_of(model, prompts, tokens, config)
        start = time.perf_counter()
        found = answers_of(model, prompts, tokens, config)
        self.seconds.append(time.perf_counter() - start)
        model.destroy_cached_continuous_batching_manager()
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
        self.tokens = sum(map(len, found))

    @property
    def speed(self) -> float:
        """Return tokens per second."""
        return self.tokens / statistics.median(self.seconds)

    def row(self) -> dict[str, Any]:
        return {
            "case": f"serving, graphs: {self.graphs}",
            "provider": self.name,
            "ms": statistics.median(self.seconds) * 1e3,
            "new_tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.speed,
        }


def ways_of(name: str, has_gpu: bool) -> list[Measured]:
    """Return what is measured, in turns: ours, the library's paged SDPA, FlashAttention-3."""
    ours = [Measured(name, graphs) for graphs in GRAPHS[has_gpu]]
    theirs = [Measured(SDPA, "no")]
    if has_flash3():
        theirs += [Measured("paged|flash_attention_3", graphs) for graphs in ("no", "async")]
    # the pair that is compared first, in case time runs out
    return [ours[0], *theirs, *ours[1:]]


class Report:
    """All figures so far, written to a file after each."""

    def __init__(self, path: Path | None, facts: dict[str, Any]) -> None:
        self.path, self.facts = path, facts
        self.ways: list[Measured] = []

    def write(self) -> None:
        if self.path is None:
            return
        rows = [way.row() for way in self.ways if way.seconds]
        base = next((way.speed for way in self.ways if way.name == SDPA and way.seconds), None)
        for row in rows:
            row["over_paged_sdpa"] = row["tokens_per_second"] / base if base else None
        self.path.write_text(json.dumps({**self.facts, "results": rows}, indent=1) + "\n")


def measure(model: Any, report: Report, tiny: bool, rounds: int, until: float) -> None:
    """Time each way in turns; none that would end after ``until`` if it took what it last did."""
    page, tokens = 64, 8 if tiny else 128
    prompts = draw(4 if tiny else 64, 64, 100 if tiny else 1000, model.config.vocab_size, 2)
    pages = sum(-(-(len(prompt) + tokens) // page) for prompt in prompts) + 64
    slowest = 0.0
    for _ in range(rounds):
        for way in report.ways:
            start = time.perf_counter()
            if start + (way.took or slowest) > until:
                print(f"{way.name}, graphs {way.graphs}: no time left", flush=True)
                continue
            way.run(
                model, prompts, tokens, batching(page, pages, 512 if tiny else 2048, way.graphs)
            )
            way.took = time.perf_counter() - start
            slowest = max(slowest, way.took)
            print(
                f"{way.name}, graphs {way.graphs}: {way.tokens} tokens in {way.seconds[-1]:.2f} s, "
                f"{way.took:.1f} s with its warm-up",
                flush=True,
            )
            report.write()


def main(arguments: list[str] | None = None) -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each implementation")
    parser.add_argument("--seconds", type=float, default=140.0, help="time of everything")
    parser.add_argument("--json", type=Path, help="write all figures there, after each run")
    asked = parser.parse_args(arguments)
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    sizes = TINY if asked.tiny else LARGE
    torch.backends.cuda.matmul.allow_tf32 = False
    # of each run it says that the manager is kept
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    name = paged.register()
    where = torch.cuda.get_device_name() if has_gpu else "CPU"
    versions = {x.__name__: x.__version__ for x in (torch, triton, transformers)}
    print(f"{where}, {', '.join(f'{name} {version}' for name, version in versions.items())}")
    today = datetime.date.today().isoformat()
    report = Report(asked.json, {"device": where, "date": today, **versions})
    model = make(sizes, device, torch.float32)
    counts = check(model, name, GRAPHS[has_gpu])
    same = all(count == counts["of"] for count in counts.values())
    parameters = sum(x.numel() for x in model.parameters())
    report.facts |= {"parameters": parameters, "answers_of_generate": counts}
    report.write()
    print(f"{parameters / 1e9:.2f} B parameters, {time.perf_counter() - start:.0f} s so far")
    if not same:
        print("other answers than generate: nothing is timed")
        return 1
    model = model.to(torch.bfloat16)
    report.ways = ways_of(name, has_gpu)
    rounds = 1 if asked.tiny else asked.rounds
    measure(model, report, asked.tiny, rounds, start + asked.seconds)
    sdpa = next(way for way in report.ways if way.name == SDPA)
    for way in report.ways:
        if way.seconds and sdpa.seconds:
            times = way.speed / sdpa.speed
            print(f"{way.name}, graphs {way.graphs}: {way.speed:.0f} tokens/s, {times:.2f}")
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
