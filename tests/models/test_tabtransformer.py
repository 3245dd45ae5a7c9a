"""TabTransformer against a literal re-implementation of the paper in float64; what is seen of it in a trace."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
import torch

import regard
from regard import errors
from regard.data.schema import Encoded, Schema
from regard.models import TabTransformer
from regard.subjects.tabular import tabular

CARDINALITIES = [3, 5, 4]


def given(rows=6, numbers=2):
    codes = torch.stack([torch.randint(0, size, (rows,)) for size in CARDINALITIES], 1)
    return torch.randn(rows, numbers), codes


def stirred(model):
    """Norms and biases begin at 1 and 0, which would hide that they are forgotten."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def norm(x, w, name):
    x = x - x.mean()
    return x / math.sqrt(float((x**2).mean()) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]


def literal(model, numbers, codes, *, heads):
    """One row after the other, one head after the other; also the weights: ``(row, block, head, query, key)``."""
    w = {name: x.double() for name, x in model.state_dict().items()}
    outputs, weights = [], []
    for row, values in zip(codes.tolist(), numbers.double(), strict=True):
        starts = [0, 3, 8]
        states = [
            torch.cat([w["columns"][i], w["values.weight"][starts[i] + code]]) for i, code in enumerate(row)
        ]  # [c_column, w_value]
        seen = []
        for block in range(len(model.blocks)):
            name = f"blocks.{block}"
            x = torch.stack(states)
            q, k, v = (x @ w[f"{name}.self_attn.in_proj_weight"].T + w[f"{name}.self_attn.in_proj_bias"]).chunk(3, -1)
            size = x.shape[1] // heads
            mixed, layer = [], []
            for head in range(heads):
                those = slice(head * size, (head + 1) * size)
                scores = q[:, those] @ k[:, those].T / math.sqrt(size)
                alpha = scores.exp() / scores.exp().sum(-1, keepdim=True)
                layer.append(alpha)
                mixed.append(alpha @ v[:, those])
            seen.append(torch.stack(layer))
            out = torch.cat(mixed, -1) @ w[f"{name}.self_attn.out_proj.weight"].T + w[f"{name}.self_attn.out_proj.bias"]
            states = [norm(a + b, w, f"{name}.norm1") for a, b in zip(x, out, strict=True)]
            fed = [
                (s @ w[f"{name}.linear1.weight"].T + w[f"{name}.linear1.bias"]).clamp(min=0)
                @ w[f"{name}.linear2.weight"].T
                + w[f"{name}.linear2.bias"]
                for s in states
            ]
            states = [norm(a + b, w, f"{name}.norm2") for a, b in zip(states, fed, strict=True)]
        x = torch.cat([*states, norm(values, w, "norm") if len(values) > 2 else values])
        for layer in ("head.0", "head.2"):
            x = (x @ w[f"{layer}.weight"].T + w[f"{layer}.bias"]).clamp(min=0)
        outputs.append(x @ w["head.4.weight"].T + w["head.4.bias"])
        weights.append(torch.stack(seen))
    return torch.stack(outputs), torch.stack(weights)


@pytest.mark.parametrize("numbers", [0, 1, 2])
def test_it_is_what_the_paper_says(numbers):
    model = stirred(TabTransformer(numbers, CARDINALITIES, 3, width=16, depth=2, heads=2))
    x, codes = given(numbers=numbers)
    expected, _ = literal(model, x, codes, heads=2)
    torch.testing.assert_close(model(x, codes).double(), expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(model.double()(x.double(), codes), expected, atol=1e-12, rtol=0)


def test_sizes_are_those_of_the_paper():
    model = TabTransformer(2, CARDINALITIES, 1)
    assert len(model.blocks) == 6
    assert model.blocks[0].self_attn.num_heads == 8
    assert model.columns.shape == (3, 4)  # an eighth of 32
    assert model.values.weight.shape == (3 + 5 + 4, 28)
    size = 3 * 32 + 2
    assert [part.weight.shape for part in model.head[::2]] == [(4 * size, size), (2 * size, 4 * size), (1, 2 * size)]


def test_a_trace_sees_its_categories_attend_and_the_numbers_are_absent():
    model = stirred(TabTransformer(2, CARDINALITIES, 3, width=16, depth=2, heads=2))
    frame = pd.DataFrame({
        "age": [20.0, 30.0, 50.0, 10.0, 5.0], "sex": ["f", "m", "f", None, "m"], "pay": [1.0, 3.0, 2.0, 5.0, 4.0],
        "job": list("abcda"), "home": list("xyzzy"),
    })  # fmt: skip
    schema = Schema.of(frame)
    assert schema.cardinalities == (3, 5, 4)
    subject = tabular(model, schema)
    t = regard.trace(subject, frame)
    assert [(site.kind, site.shape) for site in t.sites] == [("self", (5, 2, 3, 3))] * 2
    assert t.check.readout == "measured"  # all three states are read
    torch.testing.assert_close(t.readout, torch.full((5, 3), 1 / 3))
    cells = schema.encode(frame)
    _, weights = literal(model, torch.tensor(cells.numbers), torch.tensor(cells.codes), heads=2)
    for layer, site in enumerate(t.sites):
        torch.testing.assert_close(site.weights().double(), weights[:, layer], atol=2e-6, rtol=0)
    words = regard.explain(subject, frame, method="rollout")[0].words().set_index("word")["score"]
    assert words.index.tolist() == list(frame.columns)
    assert words.isna().tolist() == [True, False, True, False, False]


def test_a_missing_category_has_an_embedding_of_its_own():
    model = TabTransformer(2, CARDINALITIES, 3, width=16, depth=1, heads=2).eval()
    x, codes = given(rows=1)
    codes[:] = 1
    missing = codes.clone()
    missing[0, 1] = 0
    assert (model(x, codes) - model(x, missing)).abs().max() > 1e-4
    model(x, missing).sum().backward()
    assert (model.values.weight.grad.abs().sum(-1) > 0).nonzero().squeeze(-1).tolist() == [1, 3, 9]


@pytest.mark.parametrize("numbers", [1, 2])
def test_one_or_two_numbers_count(numbers):
    model = TabTransformer(numbers, CARDINALITIES, 1, width=16, depth=1, heads=2).eval()
    _, codes = given(rows=1)
    low, high = (model(torch.arange(1.0, 1 + numbers)[None] * size, codes) for size in (1, 3))
    assert (low - high).abs().item() > 1e-4  # a layer norm of one value is always 0, that of two a sign


def test_refusals():
    with pytest.raises(errors.InputError, match="attends to categories only"):
        TabTransformer(4, [], 2)
    with pytest.raises(errors.InputError, match="width=20 must be divisible by heads=8"):
        TabTransformer(4, [2], 2, width=20)
    for name in ("depth", "heads", "width"):
        with pytest.raises(errors.OptionError, match=f"{name}=0 must be 1 or more"):
            TabTransformer(4, [2], 2, **{name: 0})
    subject = tabular(TabTransformer(0, [3], 2), Schema.of(pd.DataFrame({"a": ["x", "y"]})))
    only = Encoded(np.zeros((4, 0), np.float32), np.array([[0], [1], [2], [1]]))
    assert regard.trace(subject, only).sites[0].weights().eq(1).all()  # one column looks at itself
