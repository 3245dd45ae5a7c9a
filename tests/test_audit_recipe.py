"""An audit of a recipe: the criteria that need more models are filled, and a run can stop and go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import regard
from regard.audited import load_audit
from regard.errors import OptionError
from regard.foreseeing import foresee

sys.path.insert(0, str(Path(__file__).parent / "trials"))

import gated

TRIALS = [
    ("uniform_trained", {"seeds": 2}), ("seeds", {"seeds": 3}),
    ("adversary", {"seeds": 3, "lambdas": [0, 0.1], "searched": 0}), ("guide", {"seeds": 2}),
    ("rationale_trained", {"seeds": 2}), ("adversarial", {"k": 2, "steps": 10}), ("permutation", {"n": 5}),
]  # fmt: skip
ASKED = {"methods": ["raw", "gradient"], "limit": 20, "shown": 1, "threads": 1}


def audited(out, trials=TRIALS, **more):
    data = gated.data(train=60, dev=20, test=40)
    return regard.audit(gated.recipe(epochs=4), data, trials=trials, out=out, **ASKED, **more)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, audited(folder)


def test_the_criteria_that_need_more_models_are_filled(whole):
    _, found = whole
    verdict = found.verdict()
    for criterion in ("necessary", "hard to manipulate", "works out of context", "exclusive"):
        assert verdict[criterion] != "not tested", criterion
    assert [(by, one.trial) for by, one in found.findings] == [
        (None, "uniform_trained"), (None, "seeds"), (None, "adversary"), (None, "guide"), ("raw", "rationale_trained"),
        ("gradient", "rationale_trained"), (None, "adversarial"), (None, "permutation"),
    ]  # fmt: skip
    by_name = {one.trial: one for _, one in found.findings}
    assert len(by_name["seeds"].values) == 40, "all that is for testing"
    assert len(by_name["permutation"].values) == 20
    level = by_name["seeds"].settings["between_seeds"]
    assert by_name["adversarial"].reference["very different"].value == max(round(level, 3), 0.1), "no stand-in"
    assert found.about["recipe"]["recipe"]["name"] == "gate"


def test_a_page_has_their_sections_and_pictures(whole, tmp_path):
    folder, found = whole
    page = found.to_html(tmp_path / "page.html").read_text()
    assert load_audit(folder).to_html(tmp_path / "again.html").read_text() == page
    for words in ("hard to manipulate", "what it pays to look elsewhere", "works out of context", "Wiegreffe"):
        assert words in page


def test_a_run_that_was_stopped_goes_on_to_the_same_findings(whole, tmp_path, monkeypatch):
    folder, _ = whole
    from regard import teaching

    fit, calls = teaching.fit, []

    def stops(*args, **options):
        calls.append(options["seed"])
        if len(calls) == 5:
            raise KeyboardInterrupt
        return fit(*args, **options)

    monkeypatch.setattr(teaching, "fit", stops)
    with pytest.raises(KeyboardInterrupt):
        audited(tmp_path / "stopped")
    again = audited(tmp_path / "stopped", resume=True)
    assert (tmp_path / "stopped/findings.json").read_bytes() == (folder / "findings.json").read_bytes()
    trained = len(calls) - 1
    records = [*(tmp_path / "stopped").glob("models-*/records.jsonl")]
    assert sum(len(one.read_text().splitlines()) for one in records) == trained, (
        "each once, but for the one that stopped"
    )
    assert again.verdict()["necessary"] != "not tested"


def test_a_subject_without_a_recipe_has_these_refused(tmp_path):
    subject = regard.pooled(regard.models.toys.decisive())
    texts = ["so so good so", "the plot is awful", "a dull film", "superb and moving", "so bad"] * 8
    found = regard.audit(subject, texts, methods=["raw"], trials=["comprehensiveness", "seeds"], shown=0)
    (refused,) = found.refused
    assert refused["trial"] == "seeds"
    assert "attention_classifier()" in refused["why"]


def test_what_it_would_train_is_foreseen_and_nothing_of_it_is_trained(monkeypatch):
    from regard import teaching
    from regard.auditing import prepared
    from regard.trying import lab_for

    lab = lab_for(gated.recipe(epochs=2), gated.data(train=60, dev=20, test=40), seed=0)
    bench = prepared(lab.subject(), lab.test, lab=lab, trials=TRIALS, **ASKED)
    monkeypatch.setattr(teaching, "fit", lambda *_, **__: pytest.fail("trained"))
    told = foresee(bench).jobs.set_index("trial")
    assert told.loc["uniform_trained", "units"] == 3, (
        "two with uniform attention, one of another seed; the base is there"
    )
    assert told.loc["seeds", "units"] == 1
    assert told.loc["adversary", "units"] == 6
    assert told.loc["guide", "units"] == 9, "eight, and the adversary that guides"
    assert [*told.loc["rationale_trained", "units"]] == [4, 2]


def test_options_are_checked_before_anything_is_trained(tmp_path, monkeypatch):
    from regard import teaching

    monkeypatch.setattr(teaching, "fit", lambda *_, **__: pytest.fail("trained"))
    with pytest.raises(OptionError, match="seed=3: seeds has no such option"):
        audited(tmp_path / "no", trials=[("seeds", {"seed": 3})])


def test_the_command_line_takes_a_recipe(tmp_path, capsys, monkeypatch):
    import shutil

    monkeypatch.chdir(tmp_path)
    gated.data(train=60, dev=20, test=40).frame().drop(columns="rationale").to_csv("data.csv", index=False)
    from regard.cli import main

    def call(*given):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, given)])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        return ended.value.code, said.out, said.err

    made = ["--recipe", "attention_classifier", "--recipe-option", "embedding=8", "--recipe-option", "hidden=4",
            "--recipe-option", "epochs=2", "--data", "data.csv"]  # fmt: skip
    trials = "uniform_trained:seeds=2,adversary:lambdas=[0,0.1],seeds=2,searched=0"
    code, out, err = call(
        "audit", *made, "--trials", trials, "--methods", "raw", "--shown", 0, "--workers", 1, "--dry-run"
    )
    assert code == 0, err
    assert "adversary" in out
    assert not (tmp_path / "runs").exists()
    code, out, err = call(
        "audit", *made, "--trials", trials, "--methods", "raw", "--shown", 0, "--workers", 1, "--json"
    )
    assert code == 0, err
    assert {one["finding"]["trial"] for one in json.loads(out)["findings"]} == {"uniform_trained", "adversary"}
    assert (tmp_path / "runs/attention_classifier-data/report.html").exists()
    code, out, err = call("trial", "deceive", *made, "--option", 'mask=["good0","bad0","good1"]', "--option", "seeds=2",
                          "--option", "lambdas=[0,1]")  # fmt: skip
    assert code == 0, err
    assert "impermissible" in out
    shutil.rmtree("runs")
    for given, says in (
        (["audit", "--recipe", "fine_tun", "--data", "data.csv"], "recipe='fine_tun' is not known. Did you mean 'fine_tune'"),
        (["audit", "--recipe", "fine_tune", "--data", "data.csv"], "needs --model, the checkpoint to begin with"),
        (["audit", "--recipe", "ft_transformer", "--model", "x", "--data", "data.csv"], "takes no --model"),
        (["audit", "--recipe", "ft_transformer"], "needs --data"),
        (["audit", "--recipe", "ft_transformer", "--data", "data.csv"], "name it by --target-column"),
        (["audit", *made, "--recipe-option", "width=3"], "recipe-option='width' is not known"),
        (["trial", "seeds", *made, "--option", "seeds=1"], "seeds=1: it takes 2 models"),
        (["trial", "deceive", *made, "--option", 'mask=["zebra"]'], "covers nothing"),
    ):  # fmt: skip
        code, out, err = call(*given)
        assert (code, out) == (2, ""), err
        assert says in " ".join(err.split())
        assert "Traceback" not in err


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups here")
def test_who_stops_while_two_models_are_trained_does_not_wait_for_them(tmp_path):
    gated.data(train=60, dev=20, test=40).frame().drop(columns="rationale").to_csv(tmp_path / "data.csv", index=False)
    given = ["audit", "--recipe", "attention_classifier", "--recipe-option", "embedding=8", "--recipe-option", "hidden=32",
             "--recipe-option", "epochs=3000", "--recipe-option", "patience=40", "--data", "data.csv", "--trials",
             "seeds:seeds=6", "--methods", "raw", "--shown", "0", "--workers", "2", "--out", "run"]  # fmt: skip
    started = subprocess.Popen(
        [str(Path(sys.executable).with_name("regard")), *given], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    deadline = time.monotonic() + 180
    while len([*tmp_path.glob("run/models-*/checkpoints/*.safetensors")]) < 2 and time.monotonic() < deadline:
        assert started.poll() is None, "it ended before it could be stopped"
        time.sleep(0.05)
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130
    assert "Go on with: regard audit" in said
    assert "Traceback" not in said
