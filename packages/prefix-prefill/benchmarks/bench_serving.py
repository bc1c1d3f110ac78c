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
import json
import logging
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prefix_prefill.integrations.transformers as paged
import torch
import transformers
from _linked.results import commit_of, describe
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig
from transformers.utils import is_flash_attn_3_available

Row = dict[str, Any]

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


def run(model: Any, way: Row, prompts: list[list[int]], tokens: int, config: Any) -> None:
    """Warm a way up, then time one more run; all that was kept for it is given back."""
    start = time.perf_counter()
    model.set_attn_implementation(way["provider"])
    answers_of(model, prompts, tokens, config)
    ready = time.perf_counter()
    found = answers_of(model, prompts, tokens, config)
    end = time.perf_counter()
    model.destroy_cached_continuous_batching_manager()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    way["seconds"] = [*way.get("seconds", ()), end - ready]
    way["with_warm_up"] = end - start
    seconds, count = statistics.median(way["seconds"]), sum(map(len, found))
    way |= {"ms": seconds * 1e3, "new_tokens": count, "tokens_per_second": count / seconds}


def ways_of(name: str, has_gpu: bool) -> list[Row]:
    """Return what is measured, in turns: ours, the library's paged SDPA, FlashAttention-3."""
    ours = [(name, graphs) for graphs in GRAPHS[has_gpu]]
    others = [(SDPA, "no")]
    # nothing is downloaded
    if has_gpu and is_flash_attn_3_available():
        others += [("paged|flash_attention_3", graphs) for graphs in ("no", "async")]
    # the pair that is compared first, in case time runs out
    every = [ours[0], *others, *ours[1:]]
    return [{"case": f"serving, graphs: {graphs}", "provider": way} for way, graphs in every]


def write(path: Path | None, facts: Row, ways: list[Row]) -> None:
    """Write all figures so far, with the speed over that of paged SDPA."""
    base = next((way.get("tokens_per_second") for way in ways if way["provider"] == SDPA), None)
    timed = [way for way in ways if "ms" in way]
    for way in timed:
        way["over_paged_sdpa"] = way["tokens_per_second"] / base if base else None
    if path is not None:
        path.write_text(json.dumps({**facts, "results": timed}, indent=1) + "\n")


def measure(model: Any, ways: list[Row], tiny: bool, until: float) -> Iterator[Row]:
    """Time each way; none that would end after ``until`` if it took what it last did."""
    page, tokens = 64, 8 if tiny else 128
    prompts = draw(4 if tiny else 64, 64, 100 if tiny else 1000, model.config.vocab_size, 2)
    pages = sum(-(-(len(prompt) + tokens) // page) for prompt in prompts) + 64
    for way in ways:
        slowest = max(other.get("with_warm_up", 0.0) for other in ways)
        if time.perf_counter() + way.get("with_warm_up", slowest) > until:
            print(f"{way['provider']}, {way['case']}: no time left", flush=True)
            continue
        graphs = way["case"].split()[-1]
        run(model, way, prompts, tokens, batching(page, pages, 512 if tiny else 2048, graphs))
        yield way


def main() -> int:
    start = time.perf_counter()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each implementation")
    parser.add_argument("--seconds", type=float, default=140.0, help="time of everything")
    parser.add_argument("--json", type=Path, help="write all figures there, after each run")
    asked = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    # of each run it says that the manager is kept
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    name = paged.register()
    facts = describe("prefix_prefill", device, commit_of(Path(__file__).parent))
    facts["transformers"] = transformers.__version__
    print(facts)
    model = make(TINY if asked.tiny else LARGE, device, torch.float32)
    counts = check(model, name, GRAPHS[has_gpu])
    facts["parameters"] = sum(x.numel() for x in model.parameters())
    facts["answers_of_generate"] = counts
    ways = ways_of(name, has_gpu)
    write(asked.json, facts, ways)
    print(
        f"{facts['parameters'] / 1e9:.2f} B parameters, {time.perf_counter() - start:.0f} s so far"
    )
    if any(count != counts["of"] for count in counts.values()):
        print("other answers than generate: nothing is timed")
        return 1
    model = model.to(torch.bfloat16)
    for _ in range(1 if asked.tiny else asked.rounds):
        for way in measure(model, ways, asked.tiny, start + asked.seconds):
            write(asked.json, facts, ways)
            print(way, flush=True)
    print(f"{time.perf_counter() - start:.0f} s in all")
    return 0


if __name__ == "__main__":
    sys.exit(main())
