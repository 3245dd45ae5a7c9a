"""The fit loop: it learns, keeps the best, stops, and is the same again with the same seed."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import errors
from regard.data import Dataset, Example
from regard.data.planted import plant
from regard.subjects.scratch import scratch_table, scratch_text
from regard.training import predict


def small(kind="binary", **options):
    torch.manual_seed(0)
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", "good", "bad", "film", "a", "so"])}
    model = regard.models.AttentionClassifier(
        words=7, embedding=8, hidden=4, encoder="projection", task=kind, **options
    )
    return regard.pooled(model, vocabulary, labels=["negative", "positive"])


def quick(model):
    return torch.optim.Adam(model.parameters(), lr=0.03)


DATA = Dataset.of([
    Example(f"{a} {word} {b}", label)
    for a in ("a", "so", "film") for b in ("film", "so") for word, label in (("good", "positive"), ("bad", "negative"))
])  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), [("binary", {}), ("multiclass", {"classes": 2})])
def test_it_learns(kind, options):
    subject = small(kind, **options)
    subject.model.train()
    history = regard.fit(subject, DATA, validation=DATA, epochs=60, batch_size=4, optimizer=quick)
    assert history["loss"].iloc[-1] < 0.1 * history["loss"].iloc[0]
    assert history["validation"].iloc[-1] == 1
    assert predict(subject, DATA.inputs()) == [example.label for example in DATA]
    assert not subject.model.training


def test_the_same_seed_gives_the_same_model_and_the_world_its_random_state():
    before = torch.get_rng_state()
    models = []
    for seed in (0, 0, 1):
        subject = small()
        before = torch.get_rng_state()
        regard.fit(subject, DATA, epochs=2, batch_size=4, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        models.append(subject.model.decoder.weight.detach().clone())
    assert torch.equal(models[0], models[1])
    assert not torch.equal(models[0], models[2])


def test_it_stops_when_validation_does_not_become_better():
    wrong = Dataset.of([Example("film", "positive"), Example("film", "negative")])
    history = regard.fit(small(), DATA, validation=wrong, epochs=50, patience=3)
    assert len(history) == 4, "one, and three that were not better"


def test_data_without_labels_is_refused():
    with pytest.raises(errors.InputError, match="1 examples have no label"):
        regard.fit(small(), Dataset.of([Example("a film", "positive"), Example("so")]))
    with pytest.raises(errors.WrongTarget, match="'meh' is not a label"):
        regard.fit(small(), Dataset.of([Example("a film", "meh")]))


def test_subjects_from_scratch_read_every_word_and_column():
    made = plant("keyword", train=20, test=4)
    subject = scratch_text(made.train.inputs(), ["negative", "positive"])
    example = next(iter(made.train))
    features = subject.encode(example.input).features[0]
    assert features.words == example.words
    assert features.tokens[0] == "[CLS]"
    assert "[UNK]" not in features.tokens
    table = plant("xor", train=20, test=4).train
    subject = scratch_table(table.columns, ["negative", "positive"], torch.zeros(8))
    assert subject.encode(table.frame()).inputs["0"].shape == (20, 8)
    with pytest.raises(errors.InputError, match="no columns \\['h'\\]"):
        subject.encode(table.frame().drop(columns="h"))
    with pytest.raises(errors.InputError, match="must hold numbers"):
        subject.encode(table.frame().assign(a="x"))
