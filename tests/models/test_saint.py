"""SAINT against a literal re-implementation of its authors' code in float64; attention over samples in a trace."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import regard
from regard import edits, errors
from regard.data.schema import Schema
from regard.models import SAINT
from regard.subjects.tabular import looked_at, tabular

CARDINALITIES = [3, 4]
KINDS = {"columns": ["self", "self"], "samples": ["samples", "samples"], "both": ["self", "samples"] * 2}
FRAME = pd.DataFrame({
    "age": [20.0, 30.0, 50.0, 10.0, 5.0], "sex": ["f", "m", "f", None, "m"], "pay": [1.0, 3.0, 2.0, 5.0, 4.0],
    "job": list("abcab"),
})  # fmt: skip
SCHEMA = Schema.of(FRAME)


def made(attention="both", **options):
    """Stirred: norms and biases begin at 1 and 0, which would hide that they are forgotten."""
    torch.manual_seed(0)
    model = SAINT(2, CARDINALITIES, 3, attention=attention, **{"width": 8, "depth": 2, "heads": 2, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model.eval()


def cells():
    encoded = SCHEMA.encode(FRAME)
    return torch.tensor(encoded.numbers), torch.tensor(encoded.codes)


def norm(x, w, name):
    x = x - x.mean(-1, keepdim=True)
    return x / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def block(x, w, name, heads, weights):
    """``(row, channel)``: what attends, whatever its rows are. PreNorm(Residual(…)), as the authors write it."""
    x = norm(x, w, f"{name}.before_attention")
    q, k, v = (x @ w[f"{name}.qkv.weight"].T).chunk(3, -1)
    size, mixed = q.shape[1] // heads, []
    for head in range(heads):
        those = slice(head * size, (head + 1) * size)
        scores = q[:, those] @ k[:, those].T * size**-0.5
        alpha = scores.exp() / scores.exp().sum(-1, keepdim=True)
        weights.append(alpha)
        mixed.append(alpha @ v[:, those])
    x = torch.cat(mixed, -1) @ w[f"{name}.out.weight"].T + w[f"{name}.out.bias"] + x
    x = norm(x, w, f"{name}.before_feed")
    values, gates = (x @ w[f"{name}.rise.weight"].T + w[f"{name}.rise.bias"]).chunk(2, -1)
    gates = gates * (1 + torch.erf(gates / math.sqrt(2))) / 2
    return values * gates @ w[f"{name}.fall.weight"].T + w[f"{name}.fall.bias"] + x


def literal(model, numbers, codes, *, heads=2):
    """Outputs, and the weights of each block: lists of ``(query, key)``, one after the other by example and head."""
    w = {name: x.double() for name, x in model.state_dict().items()}
    states = []
    for values, row in zip(numbers.double(), codes.tolist(), strict=True):
        rows = [w["cls"][0]]
        for i, value in enumerate(values):
            hidden = (value * w["numbers.first"][0, i] + w["numbers.first"][1, i]).clamp(min=0)
            rows.append(hidden @ w["numbers.second"][i] + w["numbers.bias"][i])
        rows += [w["values.weight"][start + code] for start, code in zip([0, 3], row, strict=True)]
        states.append(torch.stack(rows))
    found = []
    for number, kind in enumerate(model.kinds):
        weights = []
        if kind == "columns":
            states = [block(x, w, f"blocks.{number}", heads, weights) for x in states]
        else:
            long = block(torch.stack([x.flatten() for x in states]), w, f"blocks.{number}", heads, weights)
            states = [x.reshape(states[0].shape) for x in long]
        found.append(weights)
    cls = torch.stack([x[0] for x in states])
    hidden = (cls @ w["head.0.weight"].T + w["head.0.bias"]).clamp(min=0)
    return hidden @ w["head.2.weight"].T + w["head.2.bias"], found


@pytest.mark.parametrize("attention", KINDS)
def test_it_is_what_the_authors_wrote(attention):
    model, given = made(attention), cells()
    expected, _ = literal(model, *given)
    torch.testing.assert_close(model(*given).double(), expected, atol=5e-5, rtol=0)
    double = model.double()
    torch.testing.assert_close(double(given[0].double(), given[1]), expected, atol=1e-10, rtol=0)


def test_sizes_are_those_of_the_authors():
    assert SAINT(2, [3], 1, attention="columns").kinds == ["columns"] * 6
    both = SAINT(2, [3], 1)
    assert both.kinds == ["columns", "samples"]
    columns, samples = both.blocks
    assert columns.qkv.weight.shape == (3 * 8 * 16, 32)
    assert samples.qkv.weight.shape == (3 * 8 * 64, 4 * 32)
    assert samples.rise.weight.shape == (8 * 4 * 32, 4 * 32)
    assert both.numbers.first.shape == (2, 2, 100)


@pytest.mark.parametrize("attention", KINDS)
def test_a_trace_tells_columns_from_samples(attention):
    model = made(attention)
    subject = tabular(model, SCHEMA)
    t = regard.trace(subject, FRAME)
    assert [site.kind for site in t.sites] == KINDS[attention]
    assert t.ignored == ()
    assert torch.equal(t.output, model(*cells()))
    _, weights = literal(model, *cells())
    for site, one in zip(t.sites, weights, strict=True):
        assert site.shape == ((5, 2, 5, 5) if site.kind == "self" else (1, 2, 5, 5))  # 5 rows, 5 examples
        expected = torch.stack(one).view(site.shape)
        torch.testing.assert_close(site.weights().double(), expected, atol=5e-6, rtol=0)
    if attention == "columns":
        assert t.readout.tolist() == [[1, 0, 0, 0, 0]] * 5  # [CLS]
    if attention != "samples":
        assert t.check.readout == "measured"


def test_which_rows_a_row_looked_at():
    model = made("both")
    found = looked_at(tabular(model, SCHEMA), FRAME, 2)
    _, weights = literal(model, *cells())
    expected = torch.stack([*weights[1], *weights[3]]).mean(0)[2]  # over heads and the two sample blocks
    torch.testing.assert_close(
        torch.tensor(found.sort_index()["weight"].to_numpy()).double(), expected, atol=1e-6, rtol=0
    )
    assert found.index[found["itself"]].tolist() == [2]


def test_an_example_depends_on_others_only_where_samples_are_looked_at():
    numbers, codes = cells()
    for attention in KINDS:
        model = made(attention)
        together, alone = model(numbers, codes)[:1], model(numbers[:1], codes[:1])
        assert torch.allclose(together, alone, atol=1e-5) == (attention == "columns")


def test_attention_over_samples_is_edited_like_any_other():
    model = made("both", depth=1)
    subject = tabular(model, SCHEMA)
    found = regard.intervene(subject, FRAME, edits.uniform(sites=1))
    other = made("both", depth=1)
    with torch.no_grad():
        size = other.blocks[1].qkv.weight.shape[0] // 3
        other.blocks[1].qkv.weight[: 2 * size] = 0  # no query, no key: uniform
    torch.testing.assert_close(found, other(*cells()), atol=1e-5, rtol=0)
    assert (found - model(*cells())).abs().max() > 1e-4


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_sample_attention_is_seen_for_any_number_of_rows_and_heads(size):
    """As many heads as examples, as many rows as examples: shapes alone must not mislead."""
    frame = pd.concat([FRAME] * 2).head(size)
    t = regard.trace(tabular(made("both", depth=1, heads=size), SCHEMA), frame)
    assert [site.kind for site in t.sites] == ["self", "samples"]
    assert t.sites[1].shape == (1, size, size, size)


def test_as_many_heads_as_examples_in_four_axes_are_samples_too():
    class Authors(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv = nn.Linear(4 * 6, 3 * 3 * 8)
            self.within = nn.MultiheadAttention(6, 1, batch_first=True)

        def forward(self, x):
            q, k, v = self.qkv(x.flatten(1)[None]).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
            across = F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).reshape(x.shape)
            return self.within(x + across, x, x)[0].mean((1, 2))

    subject = regard.module(Authors(), lambda m, x: m(x), features=list("abcd"), readout="mean", output="regression")
    t = regard.trace(subject, torch.randn(3, 4, 6))  # 3 examples, 3 heads, 4 rows
    assert [(site.kind, site.shape) for site in t.sites] == [("samples", (1, 3, 3, 3)), ("self", (3, 1, 4, 4))]


def test_refusals():
    with pytest.raises(errors.OptionError, match="attention='rows'"):
        SAINT(2, [3], 1, attention="rows")
    for name in ("depth", "heads", "width"):
        with pytest.raises(errors.OptionError, match=f"{name}=0 must be 1 or more"):
            SAINT(2, [3], 1, **{name: 0})
    with pytest.raises(errors.InputError, match="a table without columns"):
        SAINT(0, [], 1)
    with pytest.raises(errors.TooLarge, match="attention='both' with 5000 columns .* Use attention='columns'"):
        SAINT(5000, [], 1)
