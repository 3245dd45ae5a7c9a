"""What the doctor says, and that it says what is wrong where something is."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import regard

NEEDS = ["weights", "gradients", "edits", "10 variants"]


class Own(nn.Module):
    """Hand-written attention, with a sink that takes a share of every row; or something that stands in its way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))
        self.how = how

    def forward(self, x):
        if self.how == "none":
            return self.v(x).mean(1)
        if self.how == "no_grad":
            with torch.no_grad():
                return self.attend(x)
        return self.attend(x)

    def attend(self, x):
        scores = self.q(x) @ self.k(x).mT / math.sqrt(8)
        scores = torch.cat([scores, torch.ones_like(scores[..., :1])], -1)
        return (scores.softmax(-1)[..., :-1] @ self.v(x)).mean(1)


def diagnosed(how: str) -> regard.diagnosis.Diagnosis:
    torch.manual_seed(0)
    subject = regard.module(Own(how).eval(), lambda model, x: model(x), features=list("abcde"), readout="mean")
    return regard.diagnose(subject, torch.randn(2, 5, 8))


def test_everything_works():
    found = diagnosed("fine")
    assert found.works
    assert [ability.name for ability in found.abilities] == NEEDS
    assert found.examples == (2, 5)
    assert list(found.frame()["works"]) == [True] * 4
    assert found.sites.to_dict("records") == [
        {
            "kind": "self",
            "number": 1,
            "heads": 1,
            "shape": (2, 1, 5, 5),
            "weights": "by the model",
            "names": "Own",
        }
    ]
    assert found.readout == "the mean of 5 rows; measured"
    assert found.error < 1e-6
    advice = " ".join(found.advice)
    assert "1 sites form their weights themselves" in advice
    assert "a sink, or dropped keys, takes the rest" in advice


def test_a_model_without_attention_gets_a_page_that_says_so():
    found = diagnosed("none")
    assert not found.works
    assert [(ability.name, ability.works, ability.passes) for ability in found.abilities] == [("weights", False, None)]
    assert found.error is None
    assert found.sites.empty
    assert "no attention was seen" in found.advice[0]
    assert "docs/add-a-model.md" in found.advice[-1]
    assert found.to_dict()["sites"] == []


def test_what_cannot_be_differentiated_is_named():
    found = diagnosed("no_grad")
    works = {ability.name: ability.works for ability in found.abilities}
    assert works == {"weights": True, "gradients": False, "edits": True, "10 variants": True}
    assert any("torch.no_grad()" in line for line in found.advice)
    assert not found.works


def test_real_models_are_served(minilm):
    found = regard.diagnose(minilm, ["a moving film", "dull"])
    assert found.works
    assert found.sites["number"].tolist() == [6]
    assert "what lies before it is run once" in found.abilities[-1].said
    assert any("special tokens" in line for line in found.advice)


@pytest.mark.parametrize("toy", ["decisive", "irrelevant"])
def test_pooled_models_are_served(toy):
    found = regard.diagnose(regard.pooled(getattr(regard.models.toys, toy)()), "so so good so")
    assert found.sites["kind"].tolist() == ["pool"]
    assert found.readout.startswith("a single attention over all rows")
    assert found.works
