"""A benchmark: check first, then time, in turns, beside rivals.

A package's benchmark is a class below ``Benchmark`` that says what is measured and who computes it;
``make_inputs``, ``reference`` and ``judge`` are functions of its module ``checks``.
Results of several runs of one commit on one machine share a file: a run replaces the cases that it
measured.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from . import documents, plot, report, results, shapes
from .cases import Case, Selected, select, split
from .children import first_line, precompile
from .providers import Prepared, Provider, UnsupportedError
from .timing import Timer, ceilings, host_microseconds, synchronize

Row = dict[str, Any]

# passes that take longer are measured in two turns: their times differ little
LONG_MS = 5.0
# turns of the providers in a case of the host
HOST_ROUNDS = 5


class Benchmark:
    """What a package measures; the attributes and methods up to ``measure`` are its own to set.

    Attributes:
        package: Import name.
        problems: All problems.
        providers: Who computes them, by name.
        families: By family: whose figures they are, and beside whom.
        specials: Families of the cases that are no problems, by name.
        quick: Names of the problems of ``--quick``.
        written: The documents whose tables are written.
        most_jobs: Processes that compile ahead, at most.
        budget_s: Seconds after which no problem is begun, unless one says otherwise.
        matmul_tflops: A matrix product's rate on one NVIDIA H200 (8192**3, bf16, best of several).
        copy_tbps: A device-to-device copy's bandwidth there, bytes read plus written.
    """

    package: str
    problems: Sequence[Any]
    providers: dict[str, Provider]
    families: dict[str, tuple[str, ...]]
    specials: dict[str, str]
    quick: frozenset[str] = frozenset()
    written: tuple[Path, ...] = ()
    most_jobs = 12
    budget_s = 450.0
    matmul_tflops, copy_tbps = 788.0, 4.27

    def __init__(self, about: str, script: str) -> None:
        self.about, self.script = about, script
        # by the name of a case: its problem and its pass
        self.cases = {p.case(one): (p, one) for p in self.problems for one in p.passes}

    @staticmethod
    def make_inputs(problem: Any, device: str, seed: int = 0) -> Any:
        """Draw the tensors of a problem."""
        raise NotImplementedError

    @staticmethod
    def reference(problem: Any, inputs: Any, passes: tuple[str, ...]) -> Any:
        """Return what results are held to."""
        raise NotImplementedError

    @staticmethod
    def judge(problem: Any, one: str, got: Any, expected: Any) -> tuple[bool, Any]:
        """Return whether the results of a pass are right, and their errors; NaN never passes."""
        raise NotImplementedError

    def draw(self, dice: shapes.Dice) -> Any:
        """Draw a problem of the family ``shapes``, whose name tells all of it; None: once more."""
        raise NotImplementedError

    def named(self, name: str) -> Any:
        """Return the problem of that family that a name tells, or None."""
        return None

    def special(self, name: str, names: list[str], timer: Timer) -> list[Row]:
        """Measure a case that is no problem; times of the host have ``median_us``."""
        raise NotImplementedError

    def facts(self, problem: Any, inputs: Any) -> Row:
        """Return what else a row tells of a problem."""
        return {}

    def numbers(self, problem: Any, one: str, ms: float) -> Row:
        """Return the rates of a pass that took so long."""
        return {}

    def unit(self, family: str) -> str:
        """Return by which number a family is told: ``ms``, or one of ``numbers``."""
        return "ms"

    def graph_below(self, problem: Any, one: str) -> float:
        """Return below how many milliseconds a pass is timed in a CUDA graph."""
        return 0.0

    def time_further(
        self, problem: Any, ready: dict[str, Prepared], rows: list[Row], timer: Timer, rounds: int
    ) -> None:
        """Add further times to the rows of a problem."""

    def rate(self, problem: Any) -> float:
        """Return the TFLOP/s that no version exceeds."""
        return self.matmul_tflops

    def summary(self, found: Row) -> str:
        """Return what else is told of the results, as text."""
        return shapes.summary(self, found) if shapes.FAMILY in self.families else ""

    def tables(self, found: Row) -> dict[str, str]:
        """Return the tables of the documents by name."""
        return {family: report.cases_of(self, found, family) for family in self.families}

    def rows_of(self, found: Row, family: str) -> list[Row]:
        """Return the rows of a family's cases that were right and timed."""
        rows = [row for row in found["results"] if row["family"] == family]
        return [row for row in rows if row["case"] in self.cases and "ms" in row]

    def plot(self, found: Row, path: Path) -> list[Path]:
        """Draw ``<stem>-<family>.png`` of each family, bars by case; return the files written."""
        written = []
        for family in self.families:
            if family == shapes.FAMILY:
                written += shapes.plot(self, found, path)
                continue
            rows = self.rows_of(found, family)
            passes = dict.fromkeys(row.get("pass", "") for row in rows)
            if rows:
                panels = [plot.bars(self, rows, one) for one in passes]
                to = path.with_name(f"{path.stem}-{family}.png")
                written.append(plot.draw(panels, to, 1, family, plot.note_of(found)))
        return written

    def floor(self, problem: Case, one: str) -> tuple[float, str]:
        """Return the milliseconds that no version is below, and what takes them."""
        compute = problem.flops(one) / self.rate(problem) / 1e9
        memory = problem.bytes(one) / self.copy_tbps / 1e9
        return (compute, "FLOPs") if compute > memory else (memory, "bytes")

    def providers_of(self, problem: Case, names: list[str]) -> list[str]:
        """Return those of some providers that a problem is measured with."""
        return [name for name in self.families.get(problem.family, names) if name in names]

    def available(self, names: list[str], device: str) -> list[str]:
        """Return the providers that can run, and say why the others cannot."""
        reasons = {name: self.providers[name].unavailable(device) for name in names}
        for name, reason in reasons.items():
            if reason is not None:
                print(f"provider {name} skipped: {reason}")
        return [name for name, reason in reasons.items() if reason is None]

    def check(self, problem: Any, one: str, prepared: Prepared, expected: Any) -> tuple[str, Row]:
        """Run a pass once; return its status and errors."""
        run = prepared.calls.get(one)
        if run is None:
            return "skipped", {"message": "no backward"}
        try:
            with prepared.context():
                got = run()
            right, errors = self.judge(prepared.problem or problem, one, got, expected)
        except Exception as error:
            return "failed", {"message": first_line(error)}
        return "ok" if right else "wrong", {"errors": errors}

    def measure(
        self, problem: Any, passes: tuple[str, ...], names: list[str], timer: Timer, rounds: int
    ) -> list[Row]:
        """Check, then time, every provider on one problem."""
        rows: list[Row] = []
        ready: dict[str, Prepared] = {}
        inputs = self.make_inputs(problem, timer.device)
        expected = self.reference(problem, inputs, passes)
        facts = self.facts(problem, inputs)
        for name in names:
            try:
                ready[name] = mine = self.providers[name].prepare(problem, inputs, passes)
                wanted = expected if mine.expected is None else mine.expected()
                status = {one: self.check(problem, one, mine, wanted) for one in passes}
                synchronize(timer.device)
            except UnsupportedError as reason:
                status = dict.fromkeys(passes, ("skipped", {"message": str(reason)}))
            except Exception as error:  # a rival's failure is a result, not an end
                status = dict.fromkeys(passes, ("failed", {"message": first_line(error)}))
            for one in passes:
                what, detail = status[one]
                row: Row = {"case": problem.case(one), "family": problem.family, **facts}
                row |= {"pass": one} if one else {}
                rows.append({**row, "provider": name, "status": what, **detail})
                if what not in ("ok", "skipped"):
                    print(f"  {problem.case(one)}: {name} is {what}: {detail}", flush=True)
        del expected
        for one in passes:
            timed = [r for r in rows if r.get("pass", "") == one and r["status"] == "ok"]
            self._time(problem, one, ready, timed, timer, rounds)
        self.time_further(problem, ready, rows, timer, rounds)
        return rows

    def _time(
        self,
        problem: Any,
        one: str,
        ready: dict[str, Prepared],
        rows: list[Row],
        timer: Timer,
        rounds: int,
    ) -> None:
        """Time a pass of those that are right, in turns."""
        for row in rows:
            row["rounds_ms"] = []
        for turn in range(rounds):
            if turn == 2 and all(min(row["rounds_ms"] or [0.0]) > LONG_MS for row in rows):
                break
            # nobody always runs after the same neighbour
            for row in rows[turn % len(rows) :] + rows[: turn % len(rows)] if rows else []:
                if row["status"] != "ok":
                    continue
                mine = ready[row["provider"]]
                try:
                    with mine.context():
                        took = timer(mine.calls[one], self.graph_below(problem, one))
                    row["rounds_ms"].append(took)
                except Exception as error:  # not every rival can be captured into a graph
                    row |= {"status": "failed", "message": first_line(error)}
                    print(f"  {row['case']}: {row['provider']} failed: {row['message']}")
        for row in rows:
            if row["status"] == "ok":
                row["ms"] = statistics.median(row["rounds_ms"])
                counted = ready[row["provider"]].problem or problem
                row |= self.numbers(counted, one, row["ms"])

    def measure_host(
        self, case: str, problem: Any, one: str, names: list[str], timer: Timer
    ) -> list[Row]:
        """Time what the host does in one warm call of a pass; providers take turns."""
        device = timer.device
        inputs = self.make_inputs(problem, device)
        rows: list[Row] = []
        ready: dict[str, Prepared] = {}
        for name in names:
            row: Row = {"case": case, "family": "host", "provider": name, "status": "ok"}
            try:
                prepared = self.providers[name].prepare(problem, inputs, (one,))
                if one not in prepared.calls:
                    continue
                with prepared.context():
                    prepared.calls[one]()
                ready[name] = prepared
            except UnsupportedError:
                continue
            except Exception as error:
                row |= {"status": "failed", "message": first_line(error)}
            rows.append(row)
        took: dict[str, list[Row]] = {name: [] for name in ready}
        for _ in range(HOST_ROUNDS if device == "cuda" else 1):
            for name, prepared in ready.items():
                with prepared.context():
                    took[name].append(host_microseconds(prepared.calls[one], device))
        for row in rows:
            if times := took.get(row["provider"]):
                row["median_us"] = statistics.median(each["median_us"] for each in times)
                row["min_us"] = min(each["min_us"] for each in times)
        return rows

    def run(self, arguments: argparse.Namespace) -> Row:
        """Measure what the arguments ask for; a run that is cut short leaves what it has."""
        began = time.monotonic()
        device = "cpu" if arguments.dry_run else "cuda"
        # the reference is fp32, not TF32
        torch.set_float32_matmul_precision("highest")
        problems, specials = self.chosen(arguments)
        names = self.available(split(arguments.providers), device)
        commit = arguments.commit or results.commit_of(Path(self.script).parent)
        machine = results.describe(self.package, device, commit)
        print(", ".join(f"{key} {value}" for key, value in machine.items()), flush=True)
        known = arguments.json is not None and arguments.json.exists() and not arguments.anew
        before = results.read(arguments.json) if known else None
        if before is not None:
            results.merge(before, {**before, "machine": machine})  # refuses another machine's
        if device == "cuda" and arguments.jobs > 0 and len(problems) > 1:
            compiled = [name for name in names if self.providers[name].compiles]
            for line in precompile(self, problems, compiled, arguments.jobs):
                print(line)
            print(f"[{time.monotonic() - began:5.0f} s] compiled ahead", flush=True)
        timer = Timer(device, arguments.warmup, arguments.rep)
        rounds = 1 if arguments.dry_run else arguments.rounds
        settings = {"warmup_ms": arguments.warmup, "rep_ms": arguments.rep, "rounds": rounds}
        settings |= {"seed": arguments.seed, "shapes": arguments.shapes}
        this = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        found: Row = {"machine": machine, "results": [], "host": []}
        found["runs"] = {this: {"settings": settings, "ceilings": ceilings(timer)}}

        def keep(rows: list[Row], text: str) -> None:
            for row in rows:
                is_host = "median_us" in row or row.get("family") == "host"
                found["host" if is_host else "results"].append({**row, "run": this})
            if arguments.json is not None:
                results.write(results.merge(before, found), arguments.json)
            print(f"[{time.monotonic() - began:5.0f} s] {text}", flush=True)

        # short, and in need of a machine that does nothing else
        for name in specials:
            try:
                rows = self.special(name, names, timer)
            except Exception as error:  # the rest goes on
                row = {"case": name, "family": self.specials[name], "provider": "ours"}
                rows = [{**row, "status": "failed", "message": first_line(error)}]
            keep(rows, name)
        for problem, passes in problems:
            if time.monotonic() - began > arguments.budget:
                print(f"out of time: {problem.name} and what follows is not measured")
                break
            small = problem.shrunk() if arguments.dry_run else problem
            here = self.providers_of(problem, names)
            try:
                rows = self.measure(small, passes, here, timer, rounds)
            except Exception as error:  # a device that faulted; what is measured is kept
                print(f"stopped at {problem.name}: {first_line(error)}", flush=True)
                break
            shown = (f"{r['provider']} {r['ms']:.3f}" for r in rows if "ms" in r)
            keep(rows, f"{problem.name}: {'  '.join(shown)} ms")
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        print(f"took {time.monotonic() - began:.0f} s")
        return results.merge(before, found)

    def chosen(self, arguments: argparse.Namespace) -> tuple[Selected, list[str]]:
        """Return the problems and the other cases that are asked for."""
        quick = set(self.quick) if getattr(arguments, "quick", False) else None
        filters, families = split(arguments.cases), split(arguments.families)
        drawn = {p.name: p for p in map(self.named, filters) if p is not None}
        asked = [*filters, *families]
        # parts of names choose among those of the table, unless the family is asked for
        if shapes.FAMILY in (asked or self.families) and quick is None:
            stream = shapes.drawn(self.draw, arguments.seed)
            drawn |= {p.name: p for p in itertools.islice(stream, arguments.shapes)}
        self.know(drawn)
        return select([*drawn.values(), *self.problems], self.specials, filters, families, quick)

    def know(self, names: Iterable[str]) -> None:
        """Add what was drawn to the cases."""
        for problem in filter(None, map(self.named, names)):
            self.cases |= {problem.case(one): (problem, one) for one in problem.passes}

    def parse(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add = parser.add_argument
        families = sorted(
            {*self.families, *(p.family for p in self.problems), *self.specials.values()}
        )
        names = ",".join(self.providers)
        jobs = max(1, min(self.most_jobs, (os.cpu_count() or 1) - 4))
        add("--cases", default="", help="comma-separated parts of case names, or families")
        add("--families", "--family", default="", help=f"comma-separated, of {','.join(families)}")
        add("--providers", default=names, help=f"comma-separated; default: {names}")
        parser.set_defaults(seed=0, shapes=0)
        if shapes.FAMILY in self.families:
            add("--shapes", type=int, default=100, help="how many shapes are drawn")
            add("--seed", type=int, default=0, help="what shapes are drawn by")
        if self.quick:
            add("--quick", action="store_true", help="only a few cases, which gates are about")
        add("--warmup", type=float, default=20.0, help="milliseconds before each measurement")
        add("--rep", type=float, default=60.0, help="milliseconds of each measurement")
        add("--rounds", type=int, default=3, help="turns that the providers of a case take")
        add("--jobs", type=int, default=jobs, help="processes that compile ahead; 0: none")
        add("--budget", type=float, default=self.budget_s, help="seconds until nothing is begun")
        add("--commit", default="", help="of the package; default: asks git")
        add("--json", type=Path, help="merge all numbers into this file")
        add("--anew", action="store_true", help="begin the file anew")
        add("--plot", type=Path, help="draw the results there")
        add("--from-json", type=Path, nargs="+", help="measure nothing: report these files")
        add("--documents", action="store_true", help="write the tables of the documents")
        add("--markdown", action="store_true", help="print the tables of the documents, too")
        add("--bounds", action="store_true", help="print both bounds of each case, as Markdown")
        add("--list", action="store_true", help="print the case names")
        add("--dry-run", action="store_true", help="tiny problems on the CPU, to try the script")
        arguments = parser.parse_args()
        for option, known in (("providers", self.providers), ("families", families)):
            if unknown := sorted(set(split(getattr(arguments, option))) - set(known)):
                parser.error(f"unknown {option} {unknown}; there are {sorted(known)}")
        return arguments

    def main(self) -> int:
        """Do what the command line asks for; return the exit status."""
        arguments = self.parse()
        if arguments.bounds:
            print(report.bounds(self))
            return 0
        if arguments.list:
            problems, specials = self.chosen(arguments)
            print("\n".join([p.case(one) for p, passes in problems for one in passes] + specials))
            return 0
        if arguments.from_json is not None:
            found = results.read(*arguments.from_json)
        elif not arguments.dry_run and not torch.cuda.is_available():
            print("no CUDA device; --dry-run tries the script on a CPU", file=sys.stderr)
            return 2
        else:
            found = self.run(arguments)
        self.know(row["case"] for row in found["results"] if row["family"] == shapes.FAMILY)
        report.show(self, found)
        if arguments.markdown:
            for name, text in self.tables(found).items():
                print(f"\n{name}\n\n{text}")
        paths = [] if arguments.plot is None else self.plot(found, arguments.plot)
        if arguments.documents:
            paths += documents.write(self.tables(found), self.written)
        for path in paths:
            print(f"wrote {path}")
        mine = [r["status"] for r in found["results"] if r["provider"].startswith("ours")]
        return 0 if set(mine) <= {"ok", "skipped"} else 1
