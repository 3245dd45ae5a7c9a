"""Looking at the same token: a wired head that does, others that do not, and attention that is written out."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from letters import Wired, llama, served

import regard
from regard import errors
from regard.circuits import random_text
from regard.models import toys

sys.path.insert(0, str(Path(__file__).parent.parent / "methods"))
from oracles import attend


def duplicate(subject, data, **options):
    return regard.heads(subject, data, probes=[("duplicate", options)], draws=50).probed.popitem()[1]


def test_a_head_that_looks_at_the_same_token_is_found():
    found = duplicate(*served(Wired("the same")), tokens=6)
    assert found.values["label"].tolist() == ["duplicate", ""]
    # it looks at its own row, too: with one, two, three before it, so much is on these
    assert found.values["value"][0] == pytest.approx(np.mean([1 / 2, 2 / 3, 3 / 4]), abs=1e-6)


def test_heads_that_look_elsewhere_are_none():
    found = duplicate(*served(Wired("previous")), tokens=6).values
    assert found["label"].tolist() == ["", ""]
    assert found["value"][0] == pytest.approx(0, abs=1e-6)
    found = duplicate(*served(toys.induction(), tokens=16, rows=48), tokens=12).values
    assert found["label"].tolist() == [""] * 4


def test_against_attention_that_is_written_out():
    model, subject, data = llama()
    found = duplicate(subject, data, tokens=12, repeats=2, sequences=3)
    ids = random_text(subject, tokens=12, repeats=2, sequences=3, seed=0)
    every = []
    for text in ids.tolist():
        layers = attend(model, {"input_ids": torch.tensor([text])}, lambda output: output.logits.sum()).weights
        rows = [(row, text.index(token)) for row, token in enumerate(text) if token in text[:row]]
        every.append(torch.cat([torch.stack([weights[:, row, at] for row, at in rows]).mean(0) for weights in layers]))
    assert found.values["value"].tolist() == pytest.approx(torch.stack(every).mean(0).tolist(), abs=1e-9)


def test_a_text_must_come_again():
    with pytest.raises(errors.OptionError, match="repeats=1"):
        duplicate(*served(Wired("the same")), repeats=1)
