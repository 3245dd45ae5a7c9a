"""What `audit`, `report` and `diff` refuse: one sentence and a next step, exit code 2, before anything heavy is done."""

from __future__ import annotations

import pytest


@pytest.fixture
def around(tmp_path, monkeypatch):
    """A folder with files of all kinds, in which the command is called."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "good.csv").write_text("text,label\n" + "a dull film,negative\n" * 6)
    (tmp_path / "empty.csv").write_text("text,label\n")
    (tmp_path / "nothing").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "bad.toml").write_text("limit = = 3")
    (tmp_path / "unknown.toml").write_text("limt = 3")
    (tmp_path / "wrong.toml").write_text("limit = 'many'")
    (tmp_path / "flag.toml").write_text("redact = 'yes'")
    (tmp_path / "table.toml").write_text("[model]\npath = 'x'")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text("{}")
    return tmp_path


GOOD = ["--model", "model", "--data", "good.csv"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], ["pass --model and --data, --recipe and --data, or --planted alone"]),
        (["--model", "model"], ["pass --model and --data"]),
        (["--model", "model", "--data", "nowhere.csv"], ["--data nowhere.csv does not exist", ".jsonl"]),
        (["--model", "./nowhere", "--data", "good.csv"], ["'./nowhere' does not exist on this machine"]),
        (["--model", "nothing", "--data", "good.csv"], ["folder without config.json", "save_pretrained"]),
        (["--model", "model", "--data", "empty.csv"], ["holds no rows"]),
        ([*GOOD, "--label-column", "stars"], ["'stars'", "text"]),
        ([*GOOD, "--text", "review"], ["'review'"]),
        ([*GOOD, "--html", "page.txt"], ["--html page.txt must end in .html"]),
        ([*GOOD, "--trials", "agreement,erasur"], ["trial='erasur'", "Did you mean 'erasure'"]),
        ([*GOOD, "--trials", "quick,erasure"], ["--trials quick stands alone"]),
        ([*GOOD, "--methods", "rolout"], ["method='rolout'", "Did you mean 'rollout'"]),
        ([*GOOD, "--methods", "norm=l2"], ["option of nothing", "name:norm=l2"]),
        ([*GOOD, "--methods", "gradient:norm"], ["is not name=value"]),
        ([*GOOD, "--methods", ""], ["at least one of --methods"]),
        ([*GOOD, "--require", "casual"], ["require='casual'", "Did you mean 'causal'"]),
        ([*GOOD, "--require", "exclusive"], ["--require exclusive", "Add one to --trials: adversarial"]),
        ([*GOOD, "--require", "hard-to-manipulate", "--trials", "all"], ["adversary trains models", "--recipe"]),
        ([*GOOD, "--out", "good.csv"], ["--out good.csv is a file"]),
        ([*GOOD, "--out", "run"], ["--out run holds a run", "--resume"]),
        ([*GOOD, "--config", "nowhere.toml"], ["--config nowhere.toml cannot be read"]),
        ([*GOOD, "--config", "bad.toml"], ["--config bad.toml is no TOML", "line 1"]),
        ([*GOOD, "--config", "unknown.toml"], ["'limt' is no option", "Did you mean 'limit'", "text_column"]),
        ([*GOOD, "--config", "wrong.toml"], ["--config wrong.toml: limit = 'many'", "valid int"]),
        ([*GOOD, "--config", "flag.toml"], ["redact = 'yes' must be true or false"]),
        ([*GOOD, "--config", "table.toml"], ["must be a text, a number or a list of texts"]),
        ([*GOOD, "--limit", "0"], ["--limit", "See: regard audit --help"]),
        ([*GOOD, "--sed", "3"], ["No such option", "See: regard audit --help"]),
    ],
)  # fmt: skip
def test_audit_refuses(around, call, given, said):
    code, out, err = call("audit", *given)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert "Traceback" not in err
    for words in said:
        assert words in err
    assert not (around / "runs").exists()


def test_an_option_of_a_method_that_there_is_not(around, call, planted_folder):
    given = ["--model", planted_folder, "--data", planted_folder / "data.jsonl"]
    code, _, err = call("audit", *given, "--methods", "gradient:nrm=l2")
    assert (code, "Did you mean 'norm'" in err) == (2, True)


@pytest.mark.parametrize("command", [["report"], ["diff", "run"]])
def test_a_folder_without_a_run_is_refused(around, call, command):
    for folder in ("nothing", "nowhere", "run"):
        code, out, err = call(*command, folder)
        assert (code, out) == (2, "")
        assert err.startswith("error: ")
        assert len(err.strip().splitlines()) == 1


def test_report_needs_an_html_file(call, run_folder):
    code, _, err = call("report", run_folder, "--html", "page.txt")
    assert (code, "must end in .html" in err) == (2, True)
