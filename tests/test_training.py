"""The fit loop: it learns, keeps the best, stops, and is the same again with the same seed."""

from __future__ import annotations

import pandas as pd
import pytest
import torch

import regard
from regard import errors
from regard.checkpointing import Memory
from regard.data import Dataset, Example
from regard.data.planted import plant
from regard.subjects.scratch import scratch_table, scratch_text
from regard.training import Aim, Diverged, predict


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


def course(subject, **options):
    return regard.fit(subject, DATA, validation=DATA, epochs=6, batch_size=4, optimizer=quick, seed=3, **options)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("after", [1, 3, 5])
def test_training_that_was_stopped_goes_on_to_the_same_bits(after, tmp_path, monkeypatch):
    whole = small()
    history = course(whole)
    path = tmp_path / "sub" / "state.safetensors"
    keep, stopped = Memory.keep, small()

    def keep_and_stop(self, row, quality):
        keep(self, row, quality)
        if len(self.rows) == after:
            raise Stopped

    monkeypatch.setattr(Memory, "keep", keep_and_stop)
    with pytest.raises(Stopped):
        course(stopped, checkpoint=path)
    monkeypatch.setattr(Memory, "keep", keep)
    again = small()
    torch.manual_seed(99)  # the world may have gone on
    pd.testing.assert_frame_equal(course(again, checkpoint=path), history)
    for name, one in whole.model.state_dict().items():
        assert torch.equal(one, again.model.state_dict()[name]), name


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = tmp_path / "state.safetensors"
    course(small(), checkpoint=path)
    with pytest.raises(errors.InputError, match="does not fit this training"):
        course(small("multiclass", classes=2), checkpoint=path)
    path.write_bytes(b"nonsense")
    with pytest.raises(errors.InputError, match="does not fit this training"):
        course(small(), checkpoint=path)


def test_a_loss_of_attention_moves_attention():
    def off_the_second(step):
        return 20 * step.looks[0].mean[:, 1].mean()

    plain, led = small(), small()
    course(plain)
    course(led, aim=Aim(sites="last", extra=off_the_second))
    on_it = [float(regard.trace(subject, "a good film").sites[0].weights()[0, 0, 0, 1]) for subject in (plain, led)]
    assert on_it[1] < on_it[0] / 2
    with pytest.raises(errors.OptionError, match="attention was not watched"):
        course(small(), aim=Aim(extra=off_the_second))


def test_uniform_from_the_first_step_on_leaves_attention_as_it_was():
    subject = small()
    before = subject.model.outer.weight.detach().clone()
    plain = regard.fit(subject, DATA, epochs=2, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
                       aim=Aim(uniform="all"))  # fmt: skip
    assert torch.equal(subject.model.outer.weight, before), "no gradient reaches it"
    assert plain["loss"].iloc[1] < plain["loss"].iloc[0]


def test_a_loss_that_is_not_finite_ends_training_with_its_history():
    subject = small()

    def explode(step):
        return step.usual * (float("inf") if len(step.examples) and explode.calls > 5 else 0)

    explode.calls = 0

    def counted(step):
        explode.calls += 1
        return explode(step)

    with pytest.raises(Diverged, match="NaN or Inf in epoch") as caught:
        regard.fit(subject, DATA, epochs=9, batch_size=4, aim=Aim(extra=counted))
    assert [row["epoch"] for row in caught.value.rows] == [0]


def test_the_penalty_of_a_model_is_part_of_its_loss():
    losses = []
    for factor in (0.0, 0.5):
        torch.manual_seed(0)
        words = {word: i for i, word in enumerate(["<pad>", "<unk>", "good", "bad", "film", "a", "so"])}
        model = regard.models.AttentionClassifier(words=7, embedding=8, hidden=4, diversity=factor)
        subject = regard.pooled(model, words, labels=["negative", "positive"])
        losses.append(regard.fit(subject, DATA, epochs=1, batch_size=100)["loss"].iloc[0])
    assert 0 < losses[1] - losses[0] <= 0.5, "conicity is between 0 and 1"
