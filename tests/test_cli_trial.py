"""`regard trial` and `regard trials`: what they print, what they write, and what they refuse."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

import regard
from regard import cli
from regard.cli import app


def run(*args):
    return CliRunner().invoke(app, [*map(str, args)], terminal_width=200)


def test_a_trial_prints_its_claim_its_outcome_and_its_references(planted_folder, tmp_path):
    page, file = tmp_path / "page.html", tmp_path / "finding.json"
    result = run("trial", "permutation", "--model", planted_folder, "--data", planted_folder / "data.jsonl",
                 "--option", "n=10", "--sites", "all", "--html", page, "--save", file)  # fmt: skip
    assert result.exit_code == 0, result.output
    found = regard.load_finding(file)
    for part in (found.claim, found.outcome, *found.reference):
        assert part in " ".join(result.stdout.split())
    assert found.settings["n"] == 10
    assert [one["site"] for one in found.settings["edited"]] == [
        f"bert.encoder.layer.{layer}.attention.self" for layer in range(2)
    ]
    assert found.claim in page.read_text()


def test_json_of_an_explanation_with_options(planted_folder):
    result = run("trial", "comprehensiveness", "--model", planted_folder, "--data", planted_folder / "data.jsonl", "--json",
                 "--method", "gradient:norm=l2", "--examples", 35, "--seed", 2)  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["settings"]["method"] == "gradient"
    assert found["settings"]["options"]["norm"] == "l2"
    assert found["settings"]["examples"] == 35
    assert len(found["values"]["rows"]) == 35
    assert found["outcome"] in ("supported", "not supported", "inconclusive")


def test_a_single_site_by_number(planted_folder):
    result = run("trial", "permutation", "--model", planted_folder, "--data", planted_folder / "data.jsonl", "--json",
                 "--option", "n=5", "--sites", "0")  # fmt: skip
    assert result.exit_code == 0, result.output
    (edited,) = json.loads(result.stdout)["settings"]["edited"]
    assert edited["site"] == "bert.encoder.layer.0.attention.self"


def test_trials_are_listed():
    result = run("trials")
    assert result.exit_code == 0
    rows = json.loads(run("trials", "--json").stdout)
    assert {row["name"] for row in rows} == set(regard.list_trials()["name"])
    for row in rows:
        assert row["name"] in result.stdout


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["permutaton", "--planted", "keyword"], "Did you mean 'permutation'"),
        (["permutation", "--planted", "keyword", "--option", "number=3"], "number=3: permutation has no such option"),
        (["permutation", "--planted", "keyword", "--option", "n"], "is not name=value"),
        (["permutation", "--planted", "keywords"], "task='keywords'"),
        (["permutation"], "pass --model and --data, --recipe and --data, or --planted alone"),
        (["permutation", "--planted", "keyword", "--html", "page.txt"], "must end in .html"),
        (["permutation", "--planted", "keyword", "--save", "page.txt"], "must end in .json"),
        (["permutation", "--model", "x", "--data", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(args, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["regard", "trial", *args])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_what_cannot_be_written_is_one_message(planted_folder, monkeypatch, capsys):
    given = ["--model", str(planted_folder), "--data", str(planted_folder / "data.jsonl"), "--option", "n=2"]
    monkeypatch.setattr("sys.argv", ["regard", "trial", "permutation", *given, "--save", "/proc/finding.json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "/proc/finding.json" in capsys.readouterr().err
