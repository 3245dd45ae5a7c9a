"""Models that do not fit one device give the numbers of the plain model: tensor parallelism, and device_map.

What is asked is in `sharded.py`, which torchrun starts in 2 and in 4 processes (gloo, on this machine).
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import distributed
from transformers import AutoModelForCausalLM

import regard
import sharded
from regard.attention.entrance import Entrance
from regard.attention.lookalikes import Trembling
from regard.attention.sharding import shards_of
from regard.fingerprints import of_subject

SECONDS = 600  # for a launch, which takes 30 to 50 on two cores that do nothing else
NOT_SERVED = ("explain norm", "explain effective")


def why_not() -> str | None:
    """Why processes cannot talk to each other here, if they cannot."""
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return "this torch has no gloo"
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
    except OSError as problem:
        return f"no socket on 127.0.0.1: {problem}"
    return None


spread = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    sharded.build(folder / "double8", 8, torch.float64, bias=True)
    for name, key_value_heads in (("grouped4", 4), ("eager4", 4), ("brief2", 2)):
        sharded.build(folder / name, key_value_heads)
    sharded.build(folder / "brief phi3", 4, family="phi3")  # whose plan leaves all heads in every process
    sharded.build(folder / "refused2", 2)
    sharded.build(folder / "refused6", 6, heads=6)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    """Of a model in this process."""
    known: dict[str, sharded.Answers] = {}

    def answers(name: str) -> sharded.Answers:
        if name not in known:
            options = {"attn_implementation": "eager"} if name.startswith("eager") else {}
            model = AutoModelForCausalLM.from_pretrained(folder / name, dtype="auto", **options)
            known[name] = sharded.answers_of(model, sharded.depth_of(name))
        return known[name]

    return answers


@pytest.fixture(scope="module")
def launched(folder):
    """The folder of what so many processes have answered; each number of processes is started once."""
    models = {
        2: ("grouped4", "double8", "eager4", "brief2", "brief phi3"),
        4: ("grouped4", "refused2", "refused6"),
    }
    failed: dict[int, str | None] = {}

    def answers(processes: int) -> Path:
        out = folder / f"of {processes}"
        if processes not in failed:
            out.mkdir()
            failed[processes] = _launch(processes, out, [folder / name for name in models[processes]])
        assert failed[processes] is None, failed[processes]
        return out

    return answers


def _launch(processes: int, out: Path, models: list[Path]) -> str | None:
    """What went wrong, if anything did."""
    source = Path(regard.__file__).parents[1]
    paths = [str(source), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    alone = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1",
        "--nproc-per-node", str(processes), sharded.__file__, str(out), *map(str, models),
    ]  # fmt: skip
    with (out / "log").open("w") as log:
        started = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=os.environ | alone | {"PYTHONPATH": ":".join(paths)}
        )  # fmt: skip
        code: Any = f"nothing within {SECONDS} seconds"
        with suppress(subprocess.TimeoutExpired):
            code = started.wait(SECONDS)
        started.terminate()  # it ends those that it has started
        started.wait()
    return None if code == 0 else f"{processes} processes ended with {code}:\n{(out / 'log').read_text()[-4000:]}"


def _answers(folder: Path, name: str, rank: int) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    return load_file(folder / f"{name}.{rank}.safetensors"), json.loads((folder / f"{name}.{rank}.json").read_text())


@spread
@pytest.mark.parametrize(
    ("processes", "name", "tolerance"),
    [
        (2, "grouped4", 1e-5), (2, "double8", 1e-9), (2, "eager4", 1e-5), (2, "brief2", 1e-5),
        (2, "brief phi3", 1e-5), (4, "grouped4", 1e-5),
    ],
)  # fmt: skip
def test_a_model_spread_over_processes_gives_the_same_numbers(processes, name, tolerance, launched, plain):
    for rank in range(processes):
        numbers, words = _answers(launched(processes), name, rank)
        assert len(numbers) > 35
        assert len(numbers) + len(words) == len(plain(name)) or processes == 4
        refused = []
        for question in (*numbers, *words):
            expected = plain(name)[question]
            if question.startswith(NOT_SERVED):
                refused.append(words[question])
            elif isinstance(expected, str):
                assert words[question] == expected
            else:
                found = numbers[question]
                assert found.shape == expected.shape, question
                gap = float((found - expected).abs().max())
                assert gap <= tolerance, f"{question}: {gap}"
        assert all("output projection, which is spread over" in one for one in refused)
        assert len(refused) == (3 if sharded.depth_of(name, processes) == "all" else 1)


@spread
def test_what_travels_are_vectors(launched):
    """One sum over processes for each question: (example, 1, key) for a mean over heads; never queries × keys."""
    for rank in range(2):
        _, words = _answers(launched(2), "shards", rank)
        assert words["held"] == [[0, 1, 2, 3], [4, 5, 6, 7]][rank]
        assert words["proof"] is True
        assert words["pull travels"] == words["gradient pull travels"] == [[3, 1, 11]]
        assert words["pull of heads travels"] == [[3, 8, 11]]
        assert words["a matrix travels"] == [[3, 1, 11, 11]]  # it was asked for
        assert words["heads of a function"] == [[1, 2], [6]][rank]


@spread
def test_what_cannot_be_served_says_so(launched):
    for rank in range(2):
        _, words = _answers(launched(2), "shards", rank)
        for name in ("onward", "inward", "heads", "trial", "audit"):
            assert re.match(r"NotServed: .*spread over 2 processes.*device_map", words[name]), words[name]
        for name in ("all at once", "largest of several rows"):
            assert re.match(r"NotServed: .*all heads of a row at once.*device_map", words[name]), words[name]


@spread
def test_what_fails_in_one_process_fails_in_all(launched):
    first, second = (_answers(launched(2), "shards", rank)[1] for rank in range(2))
    for name, raised in (
        ("bad weights of one head", "BadEdit: .*sums to 11"),
        ("not reproduced in one process", "NotReproduced: "),
        ("NaN in one process", "NonFinite: "),
    ):
        assert re.match(raised, second[name]), second[name]
        assert re.match("SeamError: .*failed in another process of the 2", first[name]), first[name]


@spread
def test_every_process_must_make_the_same_call(launched):
    first, second = (_answers(launched(2), "shards", rank)[1] for rank in range(2))
    assert first["other inputs"] == second["other inputs"]
    assert "processes [1] have other inputs than process 0" in first["other inputs"]
    assert "only [0] have made this call within 2 seconds" in first["alone"]
    assert 2 <= first["waited"] < 60
    assert "alone" not in second


@spread
def test_heads_that_cannot_be_spread_are_refused_before_anything_runs(launched):
    for rank in range(4):
        _, words = _answers(launched(4), "refused6", rank)
        assert "num_attention_heads=6 cannot be spread evenly over 4 processes" in words["refused"]
        assert "device_map" in words["refused"]
        _, words = _answers(launched(4), "refused2", rank)  # eight heads can be, their two keys and values cannot
        assert "num_key_value_heads=2 cannot be spread evenly over 4 processes" in words["refused"]


@spread
def test_the_example_runs(launched):
    assert re.search(r"word +special +score\n0 +0 +the", (launched(2) / "log").read_text())


MAPS = {
    "layers on disk": {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
                       "model.layers.1": "disk", "model.layers.2": "disk", "model.norm": "cpu", "lm_head": "disk"},
    "all on disk": {"": "disk"},
}  # fmt: skip


@pytest.mark.parametrize(("where", "name"), [("layers on disk", "grouped4"), ("all on disk", "eager4")])
def test_a_model_with_weights_elsewhere_gives_the_same_numbers(where, name, folder, plain, tmp_path):
    options = {"attn_implementation": "eager"} if name == "eager4" else {}
    model = AutoModelForCausalLM.from_pretrained(
        folder / name, device_map=MAPS[where], offload_folder=tmp_path, **options
    )
    elsewhere = [path for path, one in model.named_parameters() if one.is_meta]
    assert elsewhere
    found = sharded.answers_of(model, sharded.depth_of(name))
    assert [path for path, one in model.named_parameters() if one.is_meta] == elsewhere  # as it was
    whole = AutoModelForCausalLM.from_pretrained(folder / name)
    prints = [of_subject(regard.causal(one, sharded.tokenizer()))["weights"] for one in (model, whole)]
    assert prints[0] == prints[1]
    assert found.keys() == plain(name).keys()
    for question, expected in plain(name).items():
        if isinstance(expected, str):
            assert found[question] == expected
        else:
            torch.testing.assert_close(found[question], expected, rtol=0, atol=1e-5)


def test_noise_reaches_words_whose_table_is_on_disk(folder, tmp_path):
    """The table is another tensor in each pass; noise that reached none of them would call any ranking stable."""
    options = {"device_map": MAPS["all on disk"], "offload_folder": tmp_path}
    models = [AutoModelForCausalLM.from_pretrained(folder / "brief2", **some) for some in ({}, options)]
    outputs = []
    for model in models:
        subject = regard.causal(model, sharded.tokenizer())
        batch = subject.encode(sharded.TEXTS)
        tables = Entrance(subject, batch).tables
        with torch.no_grad():
            outputs.append(subject.forward(batch))
            with Trembling(tables, 0.5, 0):
                outputs.append(subject.forward(batch))
    assert (outputs[1] - outputs[0]).abs().max() > 0.01
    torch.testing.assert_close(outputs[2:], outputs[:2])


def test_a_model_in_one_process_has_no_shards(plain, folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "brief2")
    assert shards_of(model) is None
    site = regard.trace(regard.causal(model, sharded.tokenizer()), "a good film").sites[0]
    assert site.shard is None
    assert site.held == range(8)
