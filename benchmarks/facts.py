"""Facts in SmolLM2: where they are recalled, and whether attention to their subject tells right from wrong answers.

    python benchmarks/facts.py --pictures docs/images
    python benchmarks/facts.py --only satisfies

Causal tracing is of facts that the model knows, by lot from known_1000 (Meng et al. 2022). Right and wrong answers are
of known_1000 and of the factual relations of LRE (Hernandez et al. 2024). A probe of attention may tell relations from
one another rather than right from wrong; so it is judged within relations, too, beside what the relation alone tells,
and trained on single relations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

import regard
from regard.attention import trace
from regard.data import Dataset, Example, read
from regard.errors import NotServed
from regard.facts import answer_tokens, knows
from regard.glimpses import copies
from regard.probed import Probed
from tracing import subject_and_prompt


def known(subject: Any, facts: list[Example]) -> list[Example]:
    """Those that the model knows."""
    begun, found, first = time.perf_counter(), [], 0
    for one in facts:
        output = trace(subject, [one.input]).output[0]
        first += int(output.argmax()) == answer_tokens(subject, one)[0]
        if knows(subject, one, output):
            found.append(one)
    print(f"The model knows {len(found)} of {len(facts)} facts of known_1000; of {first} the answer's first token. "
          f"{time.perf_counter() - begun:.0f} s", flush=True)  # fmt: skip
    return found


def recalled(subject: Any, facts: list[Example], options: dict[str, Any], pictures: Path | None) -> None:
    """Indirect effects by role and layer."""
    begun = time.perf_counter()
    found = regard.heads(subject, Dataset.of(facts), probes=[("causal_tracing", options)], examples=None)
    (one,) = found.probed.values()
    print(one.sentence, *one.warnings, one.settings)
    print(one.tables["total"].round(3).to_string(index=False))
    for kind in ("state", "mlp", "attention"):
        table = one.tables[kind]
        print(f"\n{kind}\n{table.pivot(index='layer', columns='role', values='effect').round(3).to_string()}")
        best = table.loc[table.groupby("role")["effect"].idxmax()]
        print(best.round(3).to_string(index=False))
    print(f"{len(facts)} facts, {time.perf_counter() - begun:.0f} s", flush=True)
    for place, chart in enumerate(one.charts if pictures is not None else ()):
        assert pictures is not None
        one.plot(chart).save(pictures / f"facts-{('state', 'mlp', 'attention')[place]}.svg")


def related(folder: Path, most: int) -> dict[str, list[Example]]:
    """The facts of each relation of LRE, at most so many, by lot."""
    found = {}
    for file in sorted((folder / "lre_relations" / "data" / "factual").glob("*.json")):
        every = [replace(one, id=f"{file.stem}/{one.id}") for one in read(file)]
        lots = np.random.default_rng(0).permutation(len(every))[:most]
        found[file.stem] = [every[place] for place in sorted(lots)]
    return found


def satisfied(subject: Any, facts: list[Example], **options: Any) -> tuple[Probed, pd.DataFrame]:
    """What the probe found; and of the facts that were held out the scores, with their relation."""
    found = regard.heads(subject, Dataset.of(facts), probes=[("satisfies", options)], examples=None)["satisfies"]
    told = found.tables["facts"]
    return found, told.assign(relation=relation_of(told))


def relation_of(table: pd.DataFrame) -> pd.Series[str]:
    """The relation of each fact, by its name."""
    return table["fact"].str.split("/").str[0]


def pooled(subject: Any, facts: list[Example], pictures: Path | None) -> None:
    """One regression for all relations, judged over all pairs of a right and a wrong answer, and within relations."""
    for weigh in ("weights", "norms"):
        begun = time.perf_counter()
        one, told = satisfied(subject, facts, weigh=weigh)
        print(f"\n{weigh}: {one.sentence}", *one.warnings, one.settings, f"{time.perf_counter() - begun:.0f} s")
        print(one.tables["auroc"].round(3).to_string(index=False))
        learned = one.tables["learned on"]
        rate = (learned["answer"] == "right").groupby(relation_of(learned)).mean()
        told["the relation alone"] = told["relation"].map(rate).fillna(0)
        print("by the relation alone, all pairs:", judged(told, ["the relation alone"], within=False))
        print("within relations:", judged(told))
        best = one.values.reindex(one.values["value"].abs().sort_values(ascending=False).index)
        print(best.head(10)[["layer", "head", "value", "label"]].round(3).to_string(index=False), flush=True)
        if weigh == "weights" and pictures is not None:
            one.plot().save(pictures / "facts-satisfies.svg")


def judged(
    told: pd.DataFrame, columns: Sequence[str] = ("attention", "confidence", "both"), within: bool = True
) -> str:
    """AUROC of some scores, over pairs of a right and a wrong answer, of one relation or any; and their gaps."""
    right, relation = (told["answer"] == "right").to_numpy(), told["relation"].to_numpy()
    same = (relation[right][:, None] == relation[~right]) | (not within)
    lots = copies(range(len(told)), 1000, 0)
    one, other = lots[right], lots[~right]
    drawn = {}
    for column in columns:
        scores = told[column].to_numpy()
        higher = (np.sign(scores[right][:, None] - scores[~right]) + 1) / 2
        drawn[column] = ((one.T @ (higher * same)) * other.T).sum(1) / ((one.T @ same) * other.T).sum(1)
    gaps = [name for name in ("attention", "both") if name in drawn]
    drawn |= {f"{name} − confidence": drawn[name] - drawn["confidence"] for name in gaps}
    ends = {name: np.quantile(some[1:], [0.025, 0.975]) for name, some in drawn.items()}
    said = [f"{name} {some[0]:.3f} [{ends[name][0]:.3f}, {ends[name][1]:.3f}]" for name, some in drawn.items()]
    return f"{', '.join(said)} ({right.sum()} right, {(~right).sum()} wrong)"


def single(subject: Any, relations: dict[str, list[Example]]) -> None:
    """A regression for each relation that has enough right and wrong answers, as in the paper."""
    for name, facts in relations.items():
        try:
            one, told = satisfied(subject, facts, least=50)
        except NotServed as problem:
            print(f"{name}: {problem}")
            continue
        heads = int((one.values["value"] != 0).sum())
        print(f"{name}: {one.settings['right']} of {len(facts)} right, {heads} heads; {judged(told)}", flush=True)


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("/work/shared/data"))
    parser.add_argument("--facts", type=int, default=80, help="to trace")
    parser.add_argument("--noises", type=int, default=3)
    parser.add_argument("--every", type=int, default=2, help="trace each so-many-th layer")
    parser.add_argument("--each", type=int, default=100, help="facts of each relation, for one regression for all")
    parser.add_argument("--alone", type=int, default=400, help="facts of each relation, for regressions of their own")
    parser.add_argument("--only", choices=["tracing", "satisfies"])
    parser.add_argument("--pictures", type=Path, help="a folder for pictures")
    options = parser.parse_args()
    subject, _ = subject_and_prompt(1)
    facts = [*read(options.data / "known_1000" / "known_1000.json")]
    if options.only != "satisfies":
        some = known(subject, facts)
        lots = np.random.default_rng(0).permutation(len(some))[: options.facts]
        asked = {"noises": options.noises, "every": options.every}
        recalled(subject, [some[place] for place in sorted(lots)], asked, options.pictures)
    if options.only != "tracing":
        kinds = json.loads((options.data / "known_1000" / "known_1000.json").read_text("utf-8"))
        named = [replace(one, id=f"{kinds[int(one.id) - 1]['relation_id']}/{one.id}") for one in facts]
        few = related(options.data, options.each)
        pooled(subject, [*named, *(one for some in few.values() for one in some)], options.pictures)
        single(subject, {name: some for name, some in related(options.data, options.alone).items() if len(some) >= 300})


if __name__ == "__main__":
    main()
