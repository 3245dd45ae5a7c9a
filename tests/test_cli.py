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


def quiet(done: subprocess.CompletedProcess[str]) -> bool:
    """Nothing is said when nobody watches, but that it still runs, on a machine that takes half a minute."""
    return all(line.startswith("regard: ") for line in done.stderr.splitlines())


def test_version_and_help():
    assert CliRunner().invoke(app, ["--version"]).output.strip() == f"regard {regard.__version__}"
    for args, example in ((["--help"], "doctor"), (["trace", "--help"], "trace"), (["doctor", "--help"], "doctor")):
        result = CliRunner().invoke(app, args)
        assert result.exit_code == 0
        assert f"regard {example} --model" in result.output


def test_trace_prints_a_table(minilm_path):
    done = run("trace", "--model", str(minilm_path), "--text", "a moving film", "--text", "dull")
    assert done.returncode == 0
    assert quiet(done)
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
        (["--model", "{minilm}", "--image", "cat.png"], ["reads texts"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(minilm_path, args, words):
    done = run("trace", *(arg.replace("{minilm}", str(minilm_path)) for arg in args))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_doctor_prints_a_page(minilm_path):
    done = run("doctor", "--model", str(minilm_path))
    assert done.returncode == 0
    assert quiet(done)
    for words in (
        "BertModel, 22.7 M parameters, float32",
        "6 self, 12 heads, 1×12×12×12",
        "encoder.layer.{0…5}.attention.self",
        "the mean of 12 rows; measured",
        "recomputed weights × values",
    ):
        assert words in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    for ability in ("weights", "gradients", "edits", "10 variants"):
        words = [*ability.split(), "yes"]
        assert any(line[: len(words)] == words and float(line[len(words)]) > 0 for line in lines)
    assert "it predicts no class" in done.stdout.replace("\n", " ")


def test_doctor_prints_json(tmp_path, classifier, tokenizer):
    classifier.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = run("doctor", "--model", str(tmp_path), "--text", "a moving film", "--text", "dull", "--json")
    report = json.loads(done.stdout)
    assert report["works"] is True
    assert report["model"]["class"] == "BertForSequenceClassification"
    assert report["examples"] == [2, 5]
    assert report["sites"] == [
        {"kind": "self", "number": 2, "heads": 4, "shape": [2, 4, 5, 5], "weights": "fused, recomputed",
         "names": "bert.encoder.layer.{0…1}.attention.self"}
    ]  # fmt: skip
    assert report["readout"] == "row 0 ('[CLS]' in the first example); measured"
    assert report["error"] < 1e-4
    assert all(ability["passes"] > 0 for ability in report["abilities"])


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--model", "/nowhere"], ["/nowhere", "does not exist"]),
        (["--model", "{minilm}", "--image", "cat.png"], ["cat.png", "reads texts", "--text"]),
        (["--model", "{minilm}", "--text", ""], ["inputs[0]", "empty"]),
    ],
)
def test_doctor_refuses_in_one_message(minilm_path, args, words):
    done = run("doctor", *(arg.replace("{minilm}", str(minilm_path)) for arg in args))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words)


def picture(folder: Path) -> Path:
    from PIL import Image

    Image.new("RGB", (40, 30), "teal").save(folder / "teal.png")
    return folder / "teal.png"


def test_trace_of_two_sequences_has_no_nan(tmp_path, tokenizer):
    import transformers

    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=40, num_layers=1, num_heads=4, decoder_start_token_id=101,
        eos_token_id=102, pad_token_id=0,
    )  # fmt: skip
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    done = run("trace", "--model", str(tmp_path), "--text", "a moving film", "--json")
    report = json.loads(done.stdout, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert [(site["kind"], site["entropy"] is None) for site in report["sites"]] == [
        ("encoder", True), ("decoder", False), ("cross", False)
    ]  # fmt: skip
    assert "–" in run("trace", "--model", str(tmp_path), "--text", "a moving film").stdout


def test_doctor_looks_at_pictures(tmp_path):
    import transformers

    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        image_size=32,
        patch_size=8,
        num_labels=3,
    )
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    done = run("doctor", "--model", str(tmp_path), "--json")
    report = json.loads(done.stdout)
    assert report["works"] is True
    assert report["sites"][0]["shape"] == [1, 4, 17, 17]
    assert "[CLS]" in report["readout"]
    traced = run("trace", "--model", str(tmp_path), "--image", str(picture(tmp_path)), "--json")
    assert [site["kind"] for site in json.loads(traced.stdout)["sites"]] == ["self", "self"]
    refused = run("doctor", "--model", str(tmp_path), "--text", "a cat")
    assert refused.returncode == 2
    assert "looks at pictures" in refused.stderr
