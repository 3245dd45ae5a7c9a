"""Patterns of attention: all five on heads that were made for them, and the shares by loops over the models' weights."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.data import Dataset, Example
from regard.errors import NotServed
from regard.probes.pattern import PARTS, settle

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "methods")]
from handmade import handmade  # noqa: E402
from oracles import attend, bert, continued, llama  # noqa: E402

PAIRS = [
    ("one of the films , it is", "and nobody knows what came of it in the end"),
    ("all of the rest , they say", "is not worth the time that it takes to see it"),
    ("two or three men , no more", "they went to sea when the moon was up again"),
]
END = 8  # the [SEP] between the two texts


def apart(q, k):
    return (k != 0) & (k != END) & (k != 5) & ((q - k).abs() > 1)


# rules of rows q and keys k in a text of n tokens, and what each is called
RULES = {
    "to [CLS]": ("vertical", lambda q, k, n: k == 0 * q),
    "to the last [SEP]": ("vertical", lambda q, k, n: k == n - 1 + 0 * q),
    "to both [SEP]": ("vertical", lambda q, k, n: (k == END + 0 * q) | (k == n - 1)),
    "to the comma": ("vertical", lambda q, k, n: k == 5 + 0 * q),
    "self": ("diagonal", lambda q, k, n: k == q),
    "previous": ("diagonal", lambda q, k, n: k == (q - 1).clamp_min(0)),
    "neighbours": ("diagonal", lambda q, k, n: (q - k).abs() == 1),
    "previous or [SEP]": ("vertical + diagonal", lambda q, k, n: (k == (q - 1).clamp_min(0)) | (k == n - 1)),
    "some rows self, some [CLS]": ("vertical + diagonal", lambda q, k, n: k == torch.where(q % 2 == 0, q, 0)),
    "own text": ("block", lambda q, k, n: (q <= END) == (k <= END)),
    "all": ("heterogeneous", lambda q, k, n: k == k + 0 * q),
    "other text": ("heterogeneous", lambda q, k, n: (q <= END) != (k <= END)),
    "here and there": ("heterogeneous", lambda q, k, n: ((7 * q + 3 * k) % 5 == 0) & apart(q, k)),
}


def test_all_five_patterns_are_told_apart(tokenizer):
    subject = handmade(tokenizer, [rule for _, rule in RULES.values()])
    for first, second in PAIRS:
        tokens = subject.encode((first, second)).features[0].tokens
        assert tokens[END] == "[SEP]"
        assert tokens[5] == ","
    found = regard.heads(
        subject, Dataset.of([Example(pair) for pair in PAIRS]), probes="pattern", batch_size=1, draws=20
    )["pattern"]
    said = dict(zip(RULES, found.values["label"], strict=True))
    assert said == {name: expected for name, (expected, _) in RULES.items()}
    values = dict(zip(RULES, found.values["value"], strict=True))
    for name in ("to [CLS]", "to the last [SEP]", "to both [SEP]", "to the comma", "self", "previous", "own text"):
        assert values[name] == pytest.approx(1)
    assert values["all"] == pytest.approx(0, abs=1e-9), "uniform attention is chance"
    assert found.values["low"].notna().all()


@pytest.mark.parametrize("text", ["so", "so it is", "a film , it never ends and ends again and again and again ."])
def test_the_length_of_a_text_does_not_decide(tokenizer, text):
    """Of three tokens most are columns or neighbours: uniform attention must not be called after them."""
    rules = [RULES[name] for name in ("to [CLS]", "self", "all")]
    subject = handmade(tokenizer, [rule for _, rule in rules])
    if text == "so":  # [CLS] so [SEP]: every key is a column or a neighbour, and nothing can be told
        with pytest.raises(NotServed, match="defined for no head"):
            regard.heads(subject, [text, text], probes="pattern", batch_size=1, draws=5)
        return
    found = regard.heads(subject, [text, text], probes="pattern", batch_size=1, draws=5)["pattern"]
    assert found.values["label"].tolist() == [name for name, _ in rules]
    assert found.values["value"][2] == pytest.approx(0, abs=1e-9)


def literal(weights, special, signs, part, visible):
    """``(head, part)`` of one site of one text: shares and chances, by loops."""
    found = []
    two = len(set(part)) > 1
    for head in weights.numpy():
        rows = []
        for query, row in enumerate(head):
            seen = [key for key in range(len(row)) if visible(query, key)]
            columns = {key for key in seen if special[key] or signs[key] or key == 0}
            near = {key for key in seen if abs(query - key) <= 1}
            own = {key for key in seen if part[key] == part[query]}
            kinds = (columns, near, columns | near, own)
            shares = [sum(row[key] for key in kind) for kind in kinds] + [len(kind) / len(seen) for kind in kinds]
            rows.append([share if two or place % 4 != 3 else np.nan for place, share in enumerate(shares)])
        found.append(np.mean(rows, axis=0))
    return found


@pytest.mark.parametrize("kind", ["pairs", "texts", "decoder"])
def test_shares_literally(tokenizer, kind):
    model = llama(tokenizer) if kind == "decoder" else bert(tokenizer)
    subject = regard.causal(model, tokenizer) if kind == "decoder" else regard.text(model, tokenizer)
    inputs = PAIRS if kind == "pairs" else [first for first, _ in PAIRS] + ["so", "dull . it is : dull !"]
    texts = []
    for one in inputs:
        encoding = tokenizer(*one) if isinstance(one, tuple) else tokenizer(one)
        ids = encoding["input_ids"]
        special = [token in tokenizer.all_special_ids for token in ids]
        signs = [not any(map(str.isalnum, tokenizer.decode([token]))) for token in ids]
        if kind == "decoder":
            weights = continued(model, tokenizer, one).weights
        else:
            given = {name: torch.tensor([value]) for name, value in encoding.items()}
            weights = attend(model, given, lambda output: output.logits[0, 0]).weights
        seen = (lambda query, key: key <= query) if kind == "decoder" else lambda query, key: True
        part = encoding["token_type_ids"]
        texts.append([head for site in weights for head in literal(site, special, signs, part, seen)])
    wanted = np.array(texts)
    found = regard.heads(subject, Dataset.of([Example(one) for one in inputs]), probes="pattern", draws=5)["pattern"]
    parts = found.tables["parts"][[*PARTS]].to_numpy()
    assert np.isnan(wanted).any() == (kind != "pairs")
    np.testing.assert_allclose(parts, wanted.mean(0), rtol=0, atol=1e-6)


def test_the_rule_at_its_edges():
    """Shares beyond chance, (s − c) / (1 − c), against ½ and ¼; chance is 0.2 everywhere."""
    beyond = np.array([
        # vertical, diagonal, either, block: name
        (0.50, 0.00, 0.50, 0.9), (0.49, 0.10, 0.499, 0.499), (0.49, 0.10, 0.499, 0.5), (0.3, 0.24, 0.52, 0.9),
        (0.24, 0.30, 0.52, 0.9), (0.25, 0.25, 0.50, 0.9), (0.80, 0.25, 0.9, 0.1), (0.80, 0.24, 0.9, 0.1),
        (-0.2, -0.1, -0.15, np.nan), (np.nan, np.nan, np.nan, np.nan),
    ])  # fmt: skip
    names = [
        "vertical", "heterogeneous", "block", "vertical", "diagonal", "vertical + diagonal", "vertical + diagonal",
        "vertical", "heterogeneous", "",
    ]  # fmt: skip
    chance = np.where(np.isnan(beyond), np.nan, 0.2)
    means = np.concatenate([0.2 + 0.8 * (beyond + 1e-12), chance], 1).T[None]  # draw part head
    values, said = settle(means, np.zeros(len(names)))
    assert said == names
    held = [0.5, 0.499, 0.5, 0.3, 0.3, 0.5, 0.9, 0.8, -0.15, np.nan]
    np.testing.assert_allclose(values[0], held, atol=1e-9)
