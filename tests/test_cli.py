"""The command line, as a user would call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import regard
from regard.cli import app

REGARD = str(Path(sys.executable).with_name("regard"))


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([REGARD, *args], capture_output=True, text=True, timeout=120, check=False)


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"regard {regard.__version__}"
    for args in (["--help"], ["trace", "--help"]):
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0
        assert "regard trace --model" in result.output


def test_trace_prints_a_table(minilm_path):
    done = run("trace", "--model", str(minilm_path), "--text", "a moving film", "--text", "dull")
    assert done.returncode == 0
    assert done.stderr == ""  # quiet when nobody watches
    assert "6 attention sites" in done.stdout
    assert "encoder.layer.3" in done.stdout
    assert "2×12×5×5" in done.stdout


def test_trace_prints_json(minilm_path, minilm):
    done = run("trace", "--model", str(minilm_path), "--text", "a moving film", "--json")
    report = json.loads(done.stdout)
    frame = regard.trace(minilm, "a moving film").frame()
    assert [site["site"] for site in report["sites"]] == list(frame["site"])
    assert report["sites"][2]["entropy"] == pytest.approx(frame["entropy"][2], abs=1e-5)
    assert report["sites"][2]["special_share"] == pytest.approx(frame["special_share"][2], abs=1e-5)
    assert report["error"] < 1e-4
    assert report["readout"] == "measured"


def test_the_frame_is_what_the_weights_say(minilm):
    t = regard.trace(minilm, ["a moving film", "dull"])
    weights = t.sites[2].weights()
    looks = (weights * t.readout[:, None, :, None]).sum(2).mean(1)
    special = t.special_keys(t.sites[-1])
    assert special.sum(-1).tolist() == [2, 2]
    row = t.frame().iloc[2]
    assert row["special_share"] == pytest.approx(float((looks * special).sum(-1).mean()), abs=1e-5)
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    expected = (entropy * t.readout[:, None]).sum(-1).mean()
    assert row["entropy"] == pytest.approx(float(expected), abs=1e-4)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "/nowhere", "--text", "a"], ["/nowhere", "does not exist"]),
        (["--model", "{minilm}", "--text", " "], ["inputs[0]", "empty"]),
        (["--model", "{minilm}", "--text", "film " * 600], ["602 tokens", "takes 512", "truncate"]),
        (["--model", "{minilm}", "--text", "a", "--over-limit", "cut"], ["over_limit='cut'", "'allow'"]),
        (["--model", "{minilm}"], ["--text"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(minilm_path, args, words):
    done = run("trace", *(arg.replace("{minilm}", str(minilm_path)) for arg in args))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr
