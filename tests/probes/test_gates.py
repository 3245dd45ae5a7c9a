"""Hard Concrete gates, against the paper's formulas in plain floats; and a model in which one head alone is read."""

from __future__ import annotations

import math

import pytest
import torch
from taken import LIVE, TEXTS, labelled, one_head

import regard
from regard.errors import RegardError
from regard.gating import HardConcrete
from regard.training import predict


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def clipped(s):
    return min(1.0, max(0.0, s * 1.2 - 0.1))


def gate(log_a):
    made = HardConcrete(1).double()
    made.log_a.data[:] = log_a
    return made


@pytest.mark.parametrize("log_a", [-4.0, -2.5, -0.3, 0.0, 1.2, 3.0])
def test_a_gate_is_the_papers(log_a):
    given = gate(log_a)
    for u in (1e-6, 0.03, 0.4, 0.77, 0.999):
        expected = clipped(sigmoid((math.log(u) - math.log(1 - u) + log_a) / 0.33))
        assert given.drawn(torch.tensor([u], dtype=torch.float64)).item() == pytest.approx(expected, abs=1e-12)
    assert given.open.item() == pytest.approx(sigmoid(log_a - 0.33 * math.log(0.1 / 1.1)), abs=1e-12)
    assert given.settled.item() == pytest.approx(clipped(sigmoid(log_a)), abs=1e-12)


def test_so_many_gates_are_open_as_the_probability_says():
    one, draw = gate(-1.0), torch.Generator().manual_seed(0)
    noise = torch.rand(200_000, generator=draw, dtype=torch.float64)
    assert (one.drawn(noise) > 0).double().mean().item() == pytest.approx(one.open.item(), abs=0.005)


def survivors(tokenizer, penalty):
    subject = regard.text(one_head(tokenizer), tokenizer)
    before = {name: one.clone() for name, one in subject.model.state_dict().items()}
    options = {"penalty": penalty, "epochs": 40}
    table = regard.heads(
        subject, labelled(TEXTS, predict(subject, TEXTS)), probes=[("gates", options)], examples=None, batch_size=3
    )
    assert all(torch.equal(one, before[name]) for name, one in subject.model.state_dict().items())
    (one,) = table.probed.values()
    left = one.values[one.values["label"] == "open"]
    assert ((one.values["value"] > 0) == (one.values["label"] == "open")).all()
    return [(row.layer, row.head) for row in left.itertuples()], one


def test_the_head_that_is_read_stays_open_and_no_other(tokenizer):
    left, one = survivors(tokenizer, 0.003)
    assert left == [LIVE]
    score = one.tables["scores"].set_index("")["score"]
    assert score["all heads"] == 1
    assert score["lost"] == pytest.approx(score["all heads"] - score["gated heads"])


def test_where_heads_cost_nothing_all_stay_open(tokenizer):
    assert len(survivors(tokenizer, 0.0)[0]) == 12


def test_what_cannot_be_done_is_said(tokenizer):
    subject = regard.text(one_head(tokenizer), tokenizer)
    for options in ({"penalty": -1.0}, {"epochs": 0}, {"learning_rate": -0.1}):
        with pytest.raises(RegardError, match=next(iter(options))):
            regard.heads(subject, labelled(TEXTS, ["LABEL_0"] * 12), probes=[("gates", options)])
