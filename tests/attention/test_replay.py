"""Replay: what lies upstream of an edit is run once, and gives way where it cannot be right."""

from __future__ import annotations

import pytest
import torch
from test_edits import WIDTH, Block, Model, inputs_of, subject_of
from torch import Tensor, nn

import regard
from regard import edits
from regard.attention import Rerun


@pytest.fixture
def small():
    return subject_of(Model().eval(), 4), inputs_of(2, 4)


class Awkward(nn.Module):
    """Parts that cannot be replayed: one writes into its input, one returns an object of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second = Model(), Block(True, False)
        self.head = nn.Linear(WIDTH, 2)
        self.odd = Odd(how)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        x = self.first(x, real)
        made = self.odd(x)
        x = made.x if hasattr(made, "x") else x if made is None else made
        return self.head((x + self.second(x, real)).mean(1))


class Odd(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> object:
        if self.how == "writes":
            x += x.mean(1, keepdim=True)
            return None
        if self.how == "object":
            return type("Thing", (), {"x": x * 2})()
        return x.transpose(0, 1).reshape(x.shape) if self.how == "mixes examples" else x


@pytest.mark.parametrize("how", ["writes", "object", "nothing", "mixes examples"])
def test_replay_gives_way_where_it_cannot_be_right(how, caplog):
    torch.manual_seed(0)
    subject = regard.module(
        Awkward(how).eval(), lambda model, x, real: model(x, real), features=list("abcd"), readout="mean", output="embedding",
        padding=lambda x, real: real,
    )  # fmt: skip
    inputs = (torch.randn(3, 4, WIDTH), torch.ones(3, 4, dtype=torch.bool))
    rerun = Rerun(subject, inputs)
    edit = edits.permute(1, sites=2)
    with caplog.at_level("DEBUG", "regard"):
        replayed = rerun(edit, variants=6)
    full = Rerun(subject, inputs, replay=False)(edit, variants=6)
    torch.testing.assert_close(replayed, full, atol=1e-6, rtol=0)
    used = rerun.recordings[2] is not None
    assert used == (how != "writes")
    assert ("replay is off" in caplog.text) != used
    assert ("run one by one" in caplog.text) == (how == "mixes examples")
    if how == "object":  # it is run; what lies before it is not
        assert not any(call[-1][0] == id(subject.model.odd) for call in rerun.recordings[2].outputs)


def test_replay_is_proved_before_it_is_used(small, monkeypatch, caplog):
    """A recording that is wrong is noticed, and the model is run in full."""
    from regard.attention.replay import Recording

    subject, inputs = small
    expected = regard.intervene(subject, inputs, edits.permute(1, sites=1), variants=5)
    monkeypatch.setattr(
        Recording, "_repeated", lambda self, leaf, variants: leaf.repeat([variants] + [1] * (leaf.dim() - 1)) * 1.01
    )
    with caplog.at_level("DEBUG", "regard"):
        again = regard.intervene(subject, inputs, edits.permute(1, sites=1), variants=5)
    torch.testing.assert_close(again, expected, atol=1e-6, rtol=0)
    assert "replay is off: unedited variants do not give what the plain run gave" in caplog.text
