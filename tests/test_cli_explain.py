"""`regard explain` and `regard methods`, as a user would call them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import regard
from regard import cli

REGARD = str(Path(sys.executable).with_name("regard"))
TEXT = "an unbelievably dull movie"


def run(*args: str, said: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([REGARD, *args], capture_output=True, text=True, timeout=240, check=False, input=said)


def test_methods_are_listed():
    listed = json.loads(run("methods", "--json").stdout)
    assert {row["name"] for row in listed} == set(regard.list_methods()["name"])
    assert all(row["formula"] and row["passes"] for row in listed)
    shown = run("methods").stdout
    assert all(row["name"] in shown for row in listed)
    assert "control methods" in shown


def test_explain_prints_a_line_and_a_table_and_writes_a_page(minilm_path, minilm, tmp_path):
    page = tmp_path / "made" / "why.html"
    done = run(
        "explain", "--model", str(minilm_path), "--text", TEXT, "--method", "norm", "--option", "layers=rollout",
        "--top", "3", "--html", str(page),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    words = regard.explain(minilm, TEXT, method="norm", layers="rollout").words()
    best = words.loc[words["score"].abs().idxmax()]
    lines = done.stdout.splitlines()
    header = next(number for number, line in enumerate(lines) if line.startswith("position"))
    assert best["word"] in lines[header + 1]
    assert len(lines) - header - 1 == 3
    assert "norm(mix=attention, layers=rollout)" in done.stdout
    assert "unbelievably" in page.read_text()
    assert "<script" not in page.read_text()


def test_explain_streams_a_file_as_json(minilm_path, minilm, tmp_path):
    file = tmp_path / "texts.txt"
    texts = [f"text number {number} about <b>films</b>" for number in range(40)]
    file.write_text("\n\n".join(texts) + "\n")
    done = run("explain", "--model", str(minilm_path), "--texts", str(file), "--method", "rollout", "--json")
    lines = done.stdout.splitlines()
    assert len(lines) == 40
    (tmp_path / "one.json").write_text(lines[37])
    again = regard.load_explanation(tmp_path / "one.json")
    why = regard.explain(minilm, texts[37], method="rollout")
    assert again.features == why.features
    np.testing.assert_allclose(again.scores, why.scores, atol=1e-5)


def test_explain_reads_standard_input_and_similarities(minilm_path, minilm):
    done = run(
        "explain", "--model", str(minilm_path), "--texts", "-", "--method", "attention_gradient",
        "--similar-to", "boring film", "--json", said=TEXT + "\n",
    )  # fmt: skip
    found = json.loads(done.stdout)
    why = regard.explain(minilm, TEXT, method="attention_gradient", target=minilm.similarity("boring film"))
    np.testing.assert_allclose(found["scores"], why.scores, atol=1e-6)
    assert found["target"] == "similarity to 'boring film'"


def test_explain_goes_on_with_a_prompt(smollm_path, tmp_path):
    page = tmp_path / "on.html"
    done = run(
        "explain", "--model", str(smollm_path), "--text", "The capital of France is", "--method", "raw",
        "--generate", "2", "--sink", "drop", "--html", str(page),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("raw(layer=last, heads=mean)") == 2
    assert "' Paris' (probability 0." in " ".join(done.stdout.split())
    assert page.read_text().count("<figure") == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--text", "x", "--method", "grad_rolout"], "Did you mean 'grad_rollout'?"),
        (["--text", "x", "--method", "rollout", "--option", "strat_layer=1"], "Did you mean 'start_layer'?"),
        (["--text", "x", "--method", "rollout", "--option", "alpha"], "is not name=value"),
        (["--text", "x", "--method", "rollout", "--option", "alpha=2"], "alpha=2 must be between 0 and 1"),
        (["--text", "x", "--method", "grad_rollout"], "Pass --similar-to"),
        (["--text", "x", "--method", "raw", "--special", "hide"], "special='hide' is not known"),
        (["--text", "x", "--method", "raw", "--generate", "3"], "writes no text"),
        (["--method", "raw"], "pass one of --text, --texts and --image"),
        (["--texts", "not-there.txt", "--method", "raw"], "--texts not-there.txt: cannot be read"),
        (["--text", "x", "--method", "raw", "--html", "why.pdf"], "must end in .html"),
        (["--text", "  ", "--method", "raw"], "is empty"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(minilm_path, args, said, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["regard", "explain", "--model", str(minilm_path), *args])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    assert exited.value.code == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.out == ""
