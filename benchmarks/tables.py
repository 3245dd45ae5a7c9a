"""Tables: how good an FT-Transformer is, which attention ranks columns as permutation importance does, and the cost.

    make bench-tables                       all parts; hours of training on 2 cores, kept in runs/tables
    python benchmarks/tables.py speed       one of: california, adult, planted, speed
    python benchmarks/tables.py california --seeds 1

California housing (5 seeds) and Adult (1): `FTTransformerRegressor` and `FTTransformerClassifier` with default settings
after a quantile transformation of numbers, as Gorishniy et al. have it; test score beside theirs (default
configuration); then Spearman's ρ of every attention method's ranking of columns with permutation importance, both on
the rows that were trained on, beside their table 6. Where the data are not there, scikit-learn's diabetes and breast
cancer tables take their place, and nothing is published of them.
Planted: three tasks whose cause is known; which method ranks the columns that cause it highest?
Speed: global attributions of 20,000 rows, against the bare forward (and backward) pass in batches of the same size.

NOTE[DIFF] the rows that are held out for early stopping are among those "trained on". Splits are drawn by seed: 64 % to
learn from, 16 % for early stopping, 20 % for the score (Adult: its own test set).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import QuantileTransformer

import regard
from regard import catalog
from regard.data import Dataset
from regard.data.planted import confirm, plant
from regard.estimators import FTTransformerClassifier, FTTransformerRegressor, load
from regard.importance import METHODS, over_seeds
from regard.references import permutation_importance

DATA = Path(__file__).parents[2] / "shared/data/tabular"
KEPT = Path("runs/tables")
SOME = 1000  # rows for methods that take their time
DEAR = ("effective", "flow", "integrated", "norm", "token_mixing", "value_zeroing")
REFERENCES = ("gradient", "integrated_gradients", "leave_one_out")
PUBLISHED = {"california": ("RMSE", 0.4688, ".81 (.05)"), "adult": ("accuracy", 0.8574, "–")}
console = Console(width=120)


def california(seed: int) -> tuple[Any, ...]:
    """Training rows, test rows, and their targets."""
    file = DATA / "california_housing/california_housing.csv"
    frame = pd.read_csv(file) if file.is_file() else load_diabetes(as_frame=True).frame
    return tuple(train_test_split(frame.iloc[:, :-1], frame.iloc[:, -1], test_size=0.2, random_state=seed))


def adult(seed: int) -> tuple[Any, ...]:
    """The same of Adult, which has a test set of its own."""
    if not DATA.is_dir():
        frame = load_breast_cancer(as_frame=True).frame
        return tuple(train_test_split(frame.iloc[:, :-1], frame.iloc[:, -1], test_size=0.2, random_state=seed))
    train, test = (pd.read_csv(DATA / f"adult/{part}.csv", na_values="?") for part in ("train", "test"))
    return train.iloc[:, :-1], test.iloc[:, :-1], train.iloc[:, -1], test.iloc[:, -1]


def normed(train: pd.DataFrame, test: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Numbers by their quantiles, as those of a normal distribution: Gorishniy et al. do so with both tables."""
    numbers = train.select_dtypes("number").columns
    quantiles = max(min(len(train) // 30, 1000), 10)
    to_normal = QuantileTransformer(
        output_distribution="normal", n_quantiles=quantiles, subsample=10**9, random_state=seed
    )
    to_normal.fit(train[numbers].astype(float)).set_output(transform="pandas")
    train, test = (frame.assign(**to_normal.transform(frame[numbers].astype(float))) for frame in (train, test))
    return train, test


def trained(name: str, seed: int) -> tuple[Any, pd.DataFrame, Any, float]:
    """The estimator, which is kept, the rows that it was trained on, their targets, and its score on others."""
    train, test, known, wanted = {"california": california, "adult": adult}[name](seed)
    train, test = normed(train, test, seed)
    kind = FTTransformerRegressor if name == "california" else FTTransformerClassifier
    folder = KEPT / f"{name}-{seed}"
    if (folder / "estimator.json").is_file():
        estimator = load(folder)
    else:
        began = time.monotonic()
        estimator = kind(random_state=seed).fit(train, known)
        estimator.save(folder)
        console.print(f"{folder}: {len(estimator.history_)} epochs in {(time.monotonic() - began) / 60:.1f} minutes")
    said = estimator.predict(test)
    score = float((said == wanted).mean() if name == "adult" else ((said - wanted) ** 2).mean() ** 0.5)
    return estimator, train, known, score


def methods(*, dear: bool) -> list[Any]:
    """All attention methods of the catalog; those that take their time, with references, or the others."""
    every: list[Any] = [name for name, one in catalog.found().items() if one.family == "attention"]
    if dear:
        return [name for name in every if name in DEAR] + [*REFERENCES]
    return [*METHODS, *(name for name in every if name not in (*DEAR, *METHODS, "first_layer"))]


def ranked(name: str, seeds: int) -> None:
    """Test scores, and how far rankings of columns agree with permutation importance."""
    measure, published, theirs = PUBLISHED[name]
    scores, tables = [], []
    for seed in range(seeds):
        estimator, train, known, score = trained(name, seed)
        scores.append(score)
        scoring = "accuracy" if name == "adult" else "neg_root_mean_squared_error"
        permuted = permutation_importance(estimator, train, known, repeats=5, seed=seed, scoring=scoring)
        some = train.sample(min(SOME, len(train)), random_state=seed)
        parts = [(methods(dear=False), train), (methods(dear=True), some)]
        found = [regard.feature_importance(estimator.subject_, rows, methods=these) for these, rows in parts]
        tables.append(pd.concat([one.agreement(permuted) for one in found] + [_of_references(found[1], permuted)]))
        for why in found[1].refused.values() if seed == 0 else ():
            console.print(f"refused: {why}")
        console.print(f"{name}, seed {seed}: {measure} {score:.4f}; permutation: {_order(permuted.frame)}")
    console.print(f"\n{name}: {measure} {np.mean(scores):.4f} ± {np.std(scores):.4f} over {seeds} seeds", end=" ")
    console.print(f"(published, default configuration: {published}; × {np.mean(scores) / published:.3f})")
    shown = Table("ranking by", "Spearman's ρ with permutation", "interval", "sd of seeds", "published")
    table = over_seeds(tables) if seeds > 1 else tables[0].assign(deviation=np.nan)
    for _, row in table.sort_values("spearman", ascending=False).iterrows():
        spread = f"{row['deviation']:.3f}" if seeds > 1 else "–"
        given = {"average": theirs, "integrated_gradients": ".84 (.08)" if name == "california" else "–"}
        shown.add_row(
            row["method"], f"{row['spearman']:.3f}", f"[{row['low']:.3f}, {row['high']:.3f}]", spread,
            given.get(row["method"], "")
        )  # fmt: skip
    console.print(shown)


def _of_references(found: Any, permuted: Any) -> pd.DataFrame:
    """References beside permutation importance, too: they are what attention is to be compared with."""
    table: pd.DataFrame = replace(found, families=dict.fromkeys(found.families, "attention")).agreement(permuted)
    return table[table["method"].isin(REFERENCES)]


def _order(frame: pd.DataFrame) -> str:
    return ", ".join(frame["column"])


def planted(seed: int = 0) -> None:
    """Tasks whose cause is known: AUPRC of each method, by what the model was seen to use."""
    shown: dict[str, dict[str, str]] = {}
    for task in ("columns", "xor", "copied_columns"):
        made = plant(task, train=4000, test=300, undecided=0.2, seed=seed)
        train = made.train.frame()
        names = list(made.train.columns)
        estimator = FTTransformerClassifier(blocks=2, width=64, epochs=40, learning_rate=1e-3, random_state=seed)
        estimator.fit(train[names], train["label"])
        sure = confirm(made, lambda rows, using=estimator: using.predict(pd.DataFrame(rows)))  # type: ignore[misc]
        console.print(f"{task}: {made.says} {sure.says}")
        if not sure.confirmed:
            continue
        tested = Dataset.of([replace(one, rationale=mask) for one, mask in zip(made.test, sure.truth, strict=True)])
        league = regard.compare(estimator.subject_, tested, examples=200, seed=seed).league
        for _, row in league.iterrows():
            said = f"{row['auprc']:.3f} [{row['auprc_low']:.3f}, {row['auprc_high']:.3f}]"
            shown.setdefault(row["method"], {})[task] = said
    tasks = list(dict.fromkeys(task for row in shown.values() for task in row))
    table = Table("method", *(f"{task}: AUPRC" for task in tasks))
    for method, found in sorted(shown.items(), key=lambda one: one[1].get("xor", ""), reverse=True):
        table.add_row(method, *(found.get(task, "") for task in tasks))
    console.print(table)


def speed(rounds: int = 5) -> None:
    """Global attributions of 20,000 rows against bare passes; and peak memory with ten times as many rows."""
    draw = np.random.default_rng(0)
    for numbers, categories in ((8, 0), (6, 8)):
        frame = pd.DataFrame({f"n{place}": draw.normal(size=20_000) for place in range(numbers)})
        frame = frame.assign(**{f"c{place}": draw.choice([*"abcdef"], 20_000) for place in range(categories)})
        estimator = FTTransformerClassifier(epochs=1).fit(frame[:600], draw.integers(0, 2, 600))
        subject = estimator.subject_
        for method, backward in (("rollout", False), ("grad_rollout", True)):
            ratios = []
            for _ in range(rounds):
                bare = _timed(_bare, subject, frame, backward=backward)
                ratios.append(_timed(regard.feature_importance, subject, frame, methods=[method]) / bare)
            what = "forward and backward" if backward else "forward"
            console.print(
                f"{numbers + categories} columns, 20,000 rows, {method}: {statistics.median(ratios):.2f} × the bare "
                f"{what} (rounds: {', '.join(f'{one:.2f}' for one in ratios)})"
            )
    for rows in (20_000, 200_000):
        peak = subprocess.run(
            [sys.executable, __file__, "memory", "--rows", str(rows)], check=True, capture_output=True, text=True
        )
        console.print(f"peak of rollout and grad_rollout over {rows:,} rows in a stream: {peak.stdout.strip()} MiB")


def memory(rows: int) -> None:
    """The peak of a process that asks for global attributions of rows that are made on the way."""

    def parts() -> Any:
        for start in range(0, rows, 2000):
            draw = np.random.default_rng(start)
            yield pd.DataFrame(draw.normal(size=(2000, 8)), columns=[f"n{place}" for place in range(8)])

    first = next(parts())
    estimator = FTTransformerClassifier(epochs=1).fit(first[:600], np.arange(600) % 2)
    regard.feature_importance(estimator.subject_, parts(), methods=["rollout", "grad_rollout"])
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)


def _bare(subject: Any, frame: pd.DataFrame, *, backward: bool) -> None:
    """The model's own pass over all rows, encoded as ours are, in batches of the same size."""
    from regard.attention.running import ROWS_KEPT
    from regard.importance import ENCODED, ROWS_AT_ONCE

    step = (ROWS_KEPT if backward else ROWS_AT_ONCE) // (1 + frame.shape[1])
    for start in range(0, len(frame), ENCODED):
        batch = subject.encode(frame.iloc[start : start + ENCODED])
        for first in range(0, len(batch), step):
            part = batch.pick(range(first, min(first + step, len(batch))))
            with torch.set_grad_enabled(backward):
                output = subject.forward(part)
            if backward:
                output.max(-1).values.sum().backward()
                subject.model.zero_grad()


def _timed(run: Callable[..., Any], *given: Any, **options: Any) -> float:
    began = time.monotonic()
    run(*given, **options)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["california", "adult", "planted", "speed", "memory"])
    parser.add_argument("--seeds", type=int, default=5, help="of California")
    parser.add_argument("--rows", type=int, default=20_000, help="for memory")
    given = parser.parse_args()
    if not DATA.is_dir():
        console.print(f"{DATA} is not there: scikit-learn's tables are taken instead.")
    parts: dict[str, Callable[[], None]] = {
        "speed": speed, "planted": planted, "california": lambda: ranked("california", given.seeds),
        "adult": lambda: ranked("adult", 1), "memory": lambda: memory(given.rows),
    }  # fmt: skip
    for name in [given.part] if given.part else ["speed", "planted", "california", "adult"]:
        parts[name]()


if __name__ == "__main__":
    main()
