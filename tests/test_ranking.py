"""Patterns, ranked by the gradient of a gate on each head."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import errors


def test_effects_are_the_gradients_of_gates(classifier, tokenizer):
    subject = regard.text(classifier.double(), tokenizer)
    text = "a dull movie that never ends"
    found = regard.patterns(subject, text, target="good")
    frame = found.frame(top=None)
    assert len(frame) == 2 * 4
    sizes = frame["effect"].abs().tolist()
    assert sizes == sorted(sizes, reverse=True)
    assert frame["share"].sum() == pytest.approx(1)
    for row in frame.itertuples():
        step = 1e-5
        logits = [
            regard.intervene(
                subject,
                text,
                regard.edits.gate(row.head, torch.tensor([1 + sign * step], dtype=torch.float64), sites=row.layer),
            )[0, 2]
            for sign in (1, -1)
        ]
        assert float(logits[0] - logits[1]) / (2 * step) == pytest.approx(row.effect, rel=1e-5, abs=1e-9)


def test_what_a_pattern_looks_at(classifier, tokenizer):
    subject = regard.text(classifier, tokenizer)
    found = regard.patterns(subject, "dull dull movie")
    row = found.frame(top=1).iloc[0]
    weights = found.trace.sites[int(row["layer"])].weights(heads=int(row["head"]), rows=0)[0, 0, 0]
    assert int(weights.argmax()) == row["position"]
    assert found.trace.features[0].tokens[row["position"]] == row["looks_at"]
    assert row["entropy"] == pytest.approx(float(torch.special.entr(weights).sum()), abs=1e-5)


def test_pictures(classifier, tokenizer, tmp_path):
    found = regard.patterns(regard.text(classifier, tokenizer), "dull dull movie")
    assert "layer" in found.plot().svg()
    drawn = found.map(layer=1, head=2)
    torch.testing.assert_close(torch.tensor(drawn.values).float(), found.trace.sites[1].weights(heads=2)[0, 0])
    assert drawn.save(tmp_path / "map.png").stat().st_size > 1000


def test_bad_input(classifier, tokenizer):
    subject = regard.text(classifier, tokenizer)
    with pytest.raises(errors.InputError, match="holds 2 examples"):
        regard.patterns(subject, ["a", "b"])
    found = regard.patterns(subject, "a dull movie")
    with pytest.raises(errors.OptionError, match="top=0"):
        found.frame(top=0)
    with pytest.raises(errors.NoSuchPart, match="site 9 is not there"):
        found.map(layer=9, head=0)
    with pytest.raises(errors.NoSuchPart, match="so 7 is not there"):
        found.map(layer=0, head=7)
