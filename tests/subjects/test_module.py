"""Any module: how it is called, what its rows are, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard import errors


class Mean(nn.Module):
    """One self-attention over columns, then their mean."""

    def __init__(self, classes=3):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 24), nn.Linear(8, classes)

    def forward(self, x):
        q, k, v = self.embed(x[..., None]).chunk(3, -1)
        return self.head(F.scaled_dot_product_attention(q, k, v).mean(1))


NAMES = ["age", "income", "city"]


def make(model=None, forward=lambda m, x: m(x), **options):
    return regard.module(model or Mean(), forward, **{"features": NAMES, "readout": "mean", **options})


def test_tensors_tuples_and_dicts():
    model, x = Mean(), torch.randn(4, 3)
    one = regard.trace(make(model), x)
    assert one.features[0].words == tuple(NAMES)
    assert torch.equal(one.output, regard.trace(make(model, lambda m, x, y: m(x + 0 * y)), (x, x)).output)
    assert torch.equal(one.output, regard.trace(make(model, lambda m, *, x: m(x)), {"x": x}).output)


def test_labels_and_heads():
    t = regard.trace(make(labels=["a", "b", "c"]), torch.randn(4, 3), target="b", of="probability")
    torch.testing.assert_close(t.score.values, t.output.softmax(-1)[:, 1])
    binary = make(Mean(1), output="binary", labels=["no", "yes"])
    t = regard.trace(binary, torch.randn(4, 3), target="no", of="probability")
    torch.testing.assert_close(t.score.values, 1 - t.output.sigmoid()[:, 0])
    number = make(Mean(1), lambda m, x: m(x)[:, 0], output="regression")
    assert regard.trace(number, torch.randn(4, 3)).output.shape == (4, 1)


def test_a_row_or_weights_as_readout():
    model = Mean()
    forward = lambda m, x: m.head(F.scaled_dot_product_attention(*m.embed(x[..., None]).chunk(3, -1))[:, 1])  # noqa: E731
    for readout in (1, -2, [0.0, 1.0, 0.0]):
        assert (
            regard.trace(make(model, forward, readout=readout), torch.randn(2, 3)).readout.tolist() == [[0, 1, 0]] * 2
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"readout": "middle"}, "readout='middle'"),
        ({"readout": 3}, "readout=3"),
        ({"readout": [0.5, 0.5]}, "2 weights"),
        ({"readout": [0.5, 0.6, 0.5]}, "sum to 1.6"),
        ({"special_features": ["[CLS]"]}, r"\['\[CLS\]'\]"),
        ({"output": "embedding", "labels": ["a"]}, "embedding has no classes"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(errors.OptionError, match=message):
        make(**options)


def test_inputs_and_functions_that_do_not_fit():
    with pytest.raises(errors.EmptyInput):
        regard.trace(make(), torch.randn(0, 3))
    with pytest.raises(errors.InputError, match="disagree"):
        regard.trace(make(), (torch.randn(2, 3), torch.randn(3, 3)))
    with pytest.raises(errors.SubjectError, match=r"forward returned \(2, 3, 1\)"):
        regard.trace(make(forward=lambda m, x: m(x)[..., None]), torch.randn(2, 3))
    with pytest.raises(errors.SubjectError, match="padding returned"):
        regard.trace(make(padding=lambda x: torch.ones(2, 2)), torch.randn(2, 3))
    with pytest.raises(errors.SubjectError, match="not a torch.nn.Module"):
        regard.module(print, lambda m, x: x, features=NAMES, readout="mean")
    with pytest.raises(errors.SubjectError, match="3 columns.*2 labels"):
        regard.trace(make(labels=["a", "b"]), torch.randn(2, 3))
    with pytest.raises(errors.SubjectError, match="3 columns.*binary"):
        regard.trace(make(output="binary", labels=["a", "b"]), torch.randn(2, 3))
    with pytest.raises(errors.WrongTarget, match="no labels"):
        regard.trace(make(), torch.randn(2, 3), target="yes")
    with pytest.raises(errors.NoAttentionFound, match="3 keys are not rows of the input, which has 4"):
        regard.trace(make(features=[*NAMES, "more"]), torch.randn(2, 3))
