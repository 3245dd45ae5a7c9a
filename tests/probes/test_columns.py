"""Which columns heads look at: by hand, and where the answer is known."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import regard
from regard.errors import NotServed

NAMES = ["age", "job", "place", "sex"]


class Wired(nn.Module):
    """Head 0 looks at the third column, head 1 at all of them alike."""

    def forward(self, x):
        rows = torch.cat([torch.ones_like(x[:, :1]), x], 1)[..., None].expand(-1, -1, 2)  # example row channel
        scores = torch.zeros(len(x), 2, 5, 5, dtype=x.dtype)
        scores[:, 0, :, 3] = 50.0
        mixed = scores.softmax(-1) @ rows[:, None].expand(-1, 2, -1, -1)
        return mixed[:, :, 0].flatten(1)[:, :2]


def subject():
    return regard.module(
        Wired(), forward=lambda model, x: model(x), features=["[CLS]", *NAMES], special_features=["[CLS]"], readout="first",
        labels=["no", "yes"], output="softmax",
    )  # fmt: skip


def test_the_wired_head_is_found_and_the_even_one_has_no_column():
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 4)), columns=NAMES)
    found = regard.heads(subject(), regard.data.read(frame, columns=NAMES), probes=["columns"])["columns"]
    assert found.values["label"].tolist() == ["place", ""]
    np.testing.assert_allclose(found.tables["shares"][NAMES], [[0, 0, 1, 0], [0.25] * 4], atol=1e-6)
    one = np.array([0, 0, 1.0, 0])
    middle = (one + 0.25) / 2
    apart = 0.5 * np.log(1 / middle[2]) + 0.5 * (0.25 * np.log(0.25 / middle)).sum()
    np.testing.assert_allclose(found.values["value"], [apart, 0], atol=1e-6)
    assert found.sentence == "1 of 2 heads have a column of their own, most often place (1)."


@pytest.fixture
def table_subject():
    torch.manual_seed(0)
    lots = np.random.default_rng(0)
    frame = pd.DataFrame({name: lots.choice(["a", "b", "c"], 40) for name in NAMES})
    schema = regard.data.schema.Schema.of(frame)
    model = regard.models.TabTransformer(0, schema.cardinalities, 2).double().eval()
    return regard.tabular(model, schema), frame


def test_literal_definition(table_subject):
    made, frame = table_subject
    found = regard.heads(made, regard.data.read(frame, columns=NAMES), probes=["columns"], examples=None, draws=5)[
        "columns"
    ]
    traced = regard.trace(made, frame)
    expected = []
    for site in traced.sites:
        weights = site.weights().double().numpy()  # example head query key
        for head in range(site.heads):
            profile = np.zeros(len(NAMES))
            for example in range(len(frame)):
                looks = sum(float(r) * weights[example, head, q] for q, r in enumerate(traced.readout[example]))
                looks = np.array([looks[row] for row in traced.features[example].rows])
                profile += looks / looks.sum() / len(frame)
            even = np.full(len(NAMES), 1 / len(NAMES))
            middle = (profile + even) / 2
            parts = [0.5 * (p * np.log(p / middle)).sum() for p in (profile, even)]
            expected.append(sum(parts))
    np.testing.assert_allclose(found.values["value"], expected, atol=1e-9)


def test_texts_have_no_columns(classifier, tokenizer):
    with pytest.raises(NotServed, match="about tables"):
        regard.heads(regard.text(classifier, tokenizer), ["a moving film", "so so"], probes=["columns"])
