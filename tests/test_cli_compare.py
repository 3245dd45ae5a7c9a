"""`regard compare`: what it prints, what it writes, and what it refuses."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from rich.console import Console
from typer.testing import CliRunner

from regard import cli
from regard.cli import app

METHODS = ["--method", "rollout", "--method", "leave_one_out"]


def run(*args):
    return CliRunner().invoke(app, ["compare", *map(str, args)], terminal_width=200)


def test_league_agreement_and_disagreement(planted_folder, tmp_path):
    page = tmp_path / "page.html"
    result = run("--model", planted_folder, "--data", planted_folder / "data.jsonl", *METHODS, "--html", page)
    assert result.exit_code == 0, result.output
    for part in ("league table", "rollout", "random", "agreement with references", "disagree most", "AUPRC"):
        assert part in result.stdout
    assert "League table" in page.read_text()


def test_json_and_options_of_methods(planted_folder):
    result = run(
        "--model", planted_folder, "--data", planted_folder / "data.jsonl", "--method", "gradient:norm=l2,through_attention=false",
        "--json", "--examples", 5, "--how", "mask",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["method"] for row in found["league"]] == ["gradient norm=l2 through_attention=False", "random"]
    assert found["settings"]["examples"] == 5
    assert found["settings"]["how"] == "mask"


def test_processes_do_not_matter(planted_folder):
    given = ["--model", planted_folder, "--data", planted_folder / "data.jsonl", *METHODS, "--json", "--threads", 1]
    one, two = (run(*given, "--workers", workers) for workers in (1, 2))
    assert one.exit_code == two.exit_code == 0, two.output
    assert one.stdout == two.stdout
    assert len(json.loads(one.stdout)["league"]) == 3


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--planted", "keyword", "--model", "x", "--data", "y"], "or --planted alone"),
        (["--model", "x"], "pass --model and --data"),
        (["--planted", "keywords"], "task='keywords'"),
        (["--planted", "keyword", "--method", "rolout"], "Did you mean 'rollout'"),
        (["--planted", "keyword", "--html", "page.txt"], "must end in .html"),
        (["--model", "x", "--data", "nowhere.csv"], "nowhere.csv"),
        (["--planted", "keyword", "--workers", "2"], "leave --workers and --runner out"),
        (["--planted", "keyword", "--runner", "spark"], "runner='spark' is not known"),
        (["--planted", "keyword", "--address", "head:6379"], "Pass runner='ray' with it"),
        (["--planted", "keyword", "--runner", "ray", "--gpus-per-worker", "2"], "holds the model on one GPU"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(args, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["regard", "compare", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_a_plain_encoder_needs_something_to_be_similar_to(minilm_path, tmp_path, monkeypatch, capsys):
    path = tmp_path / "texts.csv"
    path.write_text("text\na moving film\na dull one\n")
    monkeypatch.setattr("sys.argv", ["regard", "compare", "--model", str(minilm_path), "--data", str(path), *METHODS])
    with pytest.raises(SystemExit):
        cli.main()
    assert "--similar-to" in capsys.readouterr().err
    result = run("--model", minilm_path, "--data", path, *METHODS, "--similar-to", "a film", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["settings"]["scalar"] == "logit"


def test_rows_that_cannot_be_used_are_named(planted_folder, tmp_path, monkeypatch, capsys):
    path = tmp_path / "bad.csv"
    path.write_text("text,label\nthe drill fell .,negative\n,positive\n")
    monkeypatch.setattr(
        "sys.argv", ["regard", "compare", "--model", str(planted_folder), "--data", str(path), *METHODS]
    )
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "row 2" in capsys.readouterr().err
    result = run("--model", planted_folder, "--data", path, *METHODS, "--on-bad", "skip")
    assert result.exit_code == 0, result.output
    assert "1 rows of the data could not be used" in " ".join(result.stdout.split())


def test_a_narrow_terminal_gets_whole_words(monkeypatch, capsys):
    from regard.cli import showing

    numbers = {"comprehensiveness": "1. 0.345 [0.300, 0.390] *", "sufficiency": "1. 0.045 [0.030, 0.090]"}
    row = {"method": "integrated_gradients", "family": "reference", **numbers, "auprc": numbers["sufficiency"]}
    monkeypatch.setattr(showing, "shown", Console(width=80))
    showing.show_league(pd.DataFrame([row | {"stability": "1.00", "forwards": "50.0"}]))
    shown = capsys.readouterr().out
    for whole in ("integrated_gradients", "comprehensiveness", "1. 0.345", "[0.300, 0.390] *"):
        assert whole in shown
