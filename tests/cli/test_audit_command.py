"""`regard audit`, `report` and `diff`: what they print and write, where options come from, exit codes, Ctrl-C."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import regard
from regard import cli
from regard.cli import audits, helps
from regard.cli.scorecard import show_foresight
from regard.errors import InputError
from regard.foreseeing import Foresight

REGARD = str(Path(sys.executable).with_name("regard"))
SMALL = ["--methods", "raw", "--trials", "comprehensiveness,permutation:n=3", "--limit", 8, "--shown", 1]


def test_from_a_model_and_a_file_to_a_scorecard_and_a_page(call, planted_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["audit", "--model", planted_folder, "--data", planted_folder / "data.jsonl", *SMALL]
    code, out, err = call(*given)
    assert code == 0, err
    folder = tmp_path / "runs" / f"{planted_folder.name}-data"
    found = regard.load_audit(folder)
    flat = " ".join(out.split())
    for words in (
        found.verdict()["causal"],
        "attention itself",
        "not tested: consistent, exclusive",
        "8 of 40 examples",
    ):
        assert words in flat
    for by, one in found.findings:
        assert " ".join(one.sentence.split()) in flat
        assert one.settings["n"] == 3 if by is None else True
    assert "2 trials of 1 explanation on 8 examples" in err
    page = folder / "report.html"
    assert str(page.relative_to(tmp_path)) in err
    assert str(planted_folder / "data.jsonl") in found.about["data"]["source"]

    code, out, _ = call("report", folder, "--html", "again.html", "--json")
    assert json.loads(out) == {"path": "again.html", "bytes": page.stat().st_size}
    assert (tmp_path / "again.html").read_bytes() == page.read_bytes()

    code, out, err = call(*given)
    assert (code, out) == (2, "")
    assert "holds a run" in err
    code, out, err = call(*given, "--resume", "--json")
    assert code == 0, err
    assert json.loads(out) == json.loads(json.dumps(found.to_dict()))


def test_a_dry_run_tells_and_writes_nothing(call, planted_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ["audit", "--model", planted_folder, "--data", planted_folder / "data.jsonl", *SMALL, "--dry-run"]
    code, out, err = call(*given, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert {row["trial"] for row in told["jobs"]} == {"comprehensiveness", "permutation", "exhibit", "heads"}
    assert all(told[name] > 0 for name in ("seconds", "memory", "disk"))
    assert not (tmp_path / "runs").exists()
    jobs, refused = pd.DataFrame(told["jobs"]), pd.DataFrame([{"trial": "fresh", "method": None, "why": "no."}])
    show_foresight(Foresight(jobs, refused, 75.0, 2, 0.01, 2_000_000_000, 12_345, {}))
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "trial method jobs examples work",
        "permutation – 1 8 0:",
        "examples to show – ",
        "refused fresh: no.",
        "about 1:15 with 2 workers as fast as this machine, 2.0 GB of memory each",
    ):
        assert words in said


def test_diff_shows_what_changed(call, run_folder, tmp_path):
    other = tmp_path / "other"
    subject = regard.pooled(regard.models.toys.irrelevant())
    texts = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad"] * 8
    tried = ["comprehensiveness", ("permutation", {"n": 5})]
    regard.audit(subject, texts, methods=["raw"], trials=tried, shown=0, out=other)
    code, out, _ = call("diff", run_folder, other)
    assert code == 0
    flat = " ".join(out.split())
    for words in ("raw criterion outcome", "causal", "attention itself", "permutation", "→ not supported", "*"):
        assert words in flat
    assert out.count("permutation") == 1  # of attention itself, not of each explanation
    rows = json.loads(call("diff", run_folder, other, "--json")[1])
    moved = next(row for row in rows if (row["method"], row["trial"]) == ("raw", "permutation"))
    assert (moved["before"], moved["after"], moved["differs"]) == ("supported", "not supported", True)


class Asked(InputError):
    pass


@pytest.fixture
def asked(monkeypatch, planted_folder, tmp_path, call):
    """What `audit` is asked, without doing it."""
    monkeypatch.chdir(tmp_path)
    caught = {}

    def prepared(subject, data, **given):
        caught.update(given)
        raise Asked("that will do.")

    monkeypatch.setattr("regard.auditing.prepared", prepared)
    monkeypatch.setattr("regard.cli.judging.asked_of", lambda *given: (None, None))

    def run(*given: object) -> dict[str, object]:
        caught.clear()
        code, _, err = call("audit", "--model", planted_folder, "--data", planted_folder / "data.jsonl", *given)
        assert (code, err) == (2, "error: that will do.\n")
        return dict(caught)

    return run


def test_command_line_environment_file_defaults_in_this_order(asked, monkeypatch, tmp_path):
    (tmp_path / "audit.toml").write_text(
        "limit = 11\nseed = 21\nbatch-size = 31\nmethods = ['rollout', 'gradient:norm=l2,through_attention=false']\n"
        "redact = true\ntrials = 'erasure'\n"
    )
    told = asked()
    assert (told["limit"], told["seed"], told["batch_size"], told["redact"]) == (None, 0, 32, False)
    assert told["trials"] == "quick"
    assert told["methods"] == [("raw", {}), ("rollout", {}), ("grad_rollout", {})]
    told = asked("--config", "audit.toml")
    assert (told["limit"], told["seed"], told["batch_size"], told["redact"]) == (11, 21, 31, True)
    assert told["methods"] == [("rollout", {}), ("gradient", {"norm": "l2", "through_attention": False})]
    assert told["trials"] == [("erasure", {})]
    monkeypatch.setenv("REGARD_AUDIT_LIMIT", "12")
    monkeypatch.setenv("REGARD_AUDIT_SEED", "22")
    monkeypatch.setenv("REGARD_AUDIT_METHODS", "raw,norm")
    told = asked("--config", "audit.toml")
    assert (told["limit"], told["seed"], told["batch_size"]) == (12, 22, 31)
    assert told["methods"] == [("raw", {}), ("norm", {})]
    told = asked("--config", "audit.toml", "--limit", 13)
    assert (told["limit"], told["seed"], told["batch_size"]) == (13, 22, 31)
    monkeypatch.setenv("REGARD_AUDIT_CONFIG", "audit.toml")
    assert asked()["batch_size"] == 31


def test_several_ways_to_name_several(asked):
    by_turns = asked(
        "--method", "raw", "--method", "gradient:norm=l2", "--trial", "permutation:n=5", "--trials", "erasure"
    )
    assert by_turns["methods"] == [("raw", {}), ("gradient", {"norm": "l2"})]
    assert by_turns["trials"] == [("permutation", {"n": 5}), ("erasure", {})]
    assert asked("--trials", "all")["trials"] == "all"


@pytest.mark.parametrize(
    ("supported", "required", "code"),
    [
        ((True, True), [], 0),
        ((False, False), [], 0),
        ((True, True), ["causal"], 0),
        ((False, True), ["causal"], 1),
        ((None, True), ["causal"], 3),
        ((None, False), ["causal", "consistent"], 3),
        ((False, None), ["causal", "consistent"], 1),
    ],
)
def test_exit_codes(run_folder, capsys, supported, required, code):
    whole = regard.load_audit(run_folder)
    one = next(finding for by, finding in whole.findings if by == "raw")
    causal = replace(one, supported=supported[0])
    consistent = replace(one, trial="agreement", criterion="consistent", supported=supported[1])
    # `consistent` is tested only where the case needs it: what was not tested is not settled either.
    found = [("raw", causal)] + [("raw", consistent)] * (supported == (False, None))
    assert audits._code(replace(whole, findings=tuple(found)), required) == code
    said = capsys.readouterr().err
    assert ("required, and" in said) is (code != 0)


def test_an_audit_in_which_nothing_can_run_is_refused(call, planted_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.csv").write_text("text\n" + "the flute fell .\n" * 6)
    code, out, err = call("audit", "--model", planted_folder, "--data", "plain.csv", "--trials", "plausibility")
    assert (code, out) == (2, "")
    assert "nothing can run" in err
    assert "rationales" in err
    assert not (tmp_path / "runs").exists()


def test_an_audit_in_which_nothing_ran_is_not_a_success(run_folder):
    nothing = replace(regard.load_audit(run_folder), findings=())
    with pytest.raises(InputError, match="nothing ran"):
        audits._code(nothing, [])


def test_the_examples_of_the_first_page_run(call, planted_folder, run_folder, tmp_path, monkeypatch):
    """As they stand; the audit itself and the training, which other tests run, are replaced by finished ones."""
    monkeypatch.chdir(tmp_path)
    whole = regard.load_audit(run_folder)
    (tmp_path / "reviews.csv").write_text("text,label\n" + "the flute fell .,positive\n" * 6)
    subject = regard.text(planted_folder)
    made = regard.data.planted.plant("keyword", train=4, test=6)
    monkeypatch.setattr("regard.training.fit_planted", lambda task, *, seed: (subject, made))
    monkeypatch.setattr("regard.auditing.Bench.audit", lambda bench, folder, *, resume, steps: whole)
    monkeypatch.setattr(audits, "_foretell", lambda bench, before, *, json, dry_run: None)
    for line in helps.EXAMPLES:
        given = shlex.split(line.replace("path/to/classifier", str(planted_folder)))
        code, out, err = call(*given[1:])
        assert code == 0, err
        assert out


def test_the_first_ctrl_c_stops_and_the_second_does_not_wait(monkeypatch, capsys, call):
    left = []
    monkeypatch.setattr("os._exit", left.append)
    stopped: list[int] = []
    before = cli._listen(stopped)
    stop = signal.signal(signal.SIGINT, before)
    with pytest.raises(KeyboardInterrupt):
        stop(signal.SIGINT, None)
    assert stopped == [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):  # os._exit did not, here
        stop(signal.SIGINT, None)
    assert left == [130]

    def interrupted(given):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(cli, "_run", interrupted)
    code, _, err = call("audit", "--model", "my model", "--data", "x.csv")
    assert code == 130
    assert (
        err == "stopped; what was finished is kept. Go on with: regard audit --model 'my model' --data x.csv --resume\n"
    )
    assert call("audit", "--resume", "--model", "m")[2].count("--resume") == 1
    assert call("trace", "--model", "m") == (130, "", "stopped.\n")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_torch_is_imported(planted_folder, tmp_path):
    given = ["audit", "--model", str(planted_folder), "--data", str(planted_folder / "data.jsonl")]
    with subprocess.Popen([REGARD, *given], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        maps = Path(f"/proc/{run.pid}/maps")
        if not maps.exists():
            run.kill()
            pytest.skip("there is no /proc to look at")
        while run.poll() is None and "libtorch" not in maps.read_text():
            time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        err = run.communicate(timeout=60)[1]
    assert run.returncode == 130, err
    said = [line for line in err.splitlines() if not line.startswith("regard: ")]  # where it takes half a minute
    assert said == [f"stopped; what was finished is kept. Go on with: {shlex.join(['regard', *given, '--resume'])}"]
