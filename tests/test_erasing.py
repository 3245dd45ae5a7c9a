"""Inputs without some of their features: what is run, with how much padding, and what is made of the outputs."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard import erasing, errors
from regard.erasing import Values, on_units, possible, removable, scores_of, units, without
from regard.types import Features

sys.path.append(str(Path(__file__).parent / "methods"))
from oracles import bert, llama, seeded, t5

TEXTS = ["a moving film", "dull, and it never ends: an unbelievably overlong movie", "so"]


@pytest.fixture(scope="module")
def subject(tokenizer):
    return regard.text(bert(tokenizer), tokenizer)


@pytest.fixture(scope="module")
def decoder(tokenizer):
    return llama(tokenizer)


@pytest.fixture(scope="module")
def causal(decoder, tokenizer):
    return regard.causal(decoder, tokenizer)


@pytest.fixture
def batches(monkeypatch):
    """What subjects are run on, from here on."""

    def watch(subject):
        seen, plain = [], type(subject).forward

        def forward(self, batch):
            seen.append(batch)
            return plain(self, batch)

        monkeypatch.setattr(type(subject), "forward", forward)
        return seen

    return watch


def lone(output, examples):
    return output


# --- units ----------------------------------------------------------------------------------------------------------


def test_units_are_words_or_tokens_and_never_special():
    features = Features(
        ("[CLS]", "over", "##long", "so", "[SEP]"), (2, 3, 4, 5, 6), ("overlong", "so"), (None, 0, 0, 1, None)
    )
    assert units(features, "word") == [(3, 4), (5,)]
    assert units(features, "token") == [(3,), (4,), (5,)]
    assert units(Features(("[CLS]",), (0,), (), (None,)), "word") == []


def test_words_without_tokens_are_no_units():
    """A text that was cut: its last words are not in the batch."""
    assert units(Features(("so",), (0,), ("so", "dull"), (0,)), "word") == [(0,)]


def test_the_tokens_of_a_unit_share_its_number(subject):
    trace = regard.trace(subject, TEXTS)
    spread = on_units(trace, [(0, (1,), torch.tensor(3.0)), (1, (2, 3, 4), torch.tensor(1.5, dtype=torch.float64))])
    assert spread.dtype == torch.float64
    assert spread.shape == trace.real.shape
    assert spread[0].tolist()[:3] == [0, 3, 0]
    assert spread[1].tolist()[:6] == [0, 0, 0.5, 0.5, 0.5, 0]
    assert spread.sum() == 4.5


def test_scores_belong_to_the_sequence_that_loses_features(subject, tokenizer):
    trace = regard.trace(subject, "so")
    assert scores_of(trace, torch.ones(1, 3)).source is None
    two = regard.trace(regard.seq2seq(t5(tokenizer), tokenizer), ("so dull", "it is an unbelievably long film"))
    found = scores_of(two, torch.ones(1, 4), errors=torch.zeros(1, 4))
    assert found.rows is None
    assert found.source.shape == found.errors.shape == two.source.real.shape


def test_what_comes_after_the_row_that_is_read_cannot_be_removed(causal):
    trace = regard.trace(causal.at(3), "dull, so so film")
    assert removable(trace)[0].tokens == ("[CLS]", "dull", ",", "so")
    assert removable(regard.trace(causal, "so film"))[0].tokens == ("[CLS]", "so", "film", "[SEP]")


# --- how ------------------------------------------------------------------------------------------------------------


def test_what_a_subject_can(subject):
    batch = subject.encode(TEXTS)
    assert possible(subject, batch, None) == "delete"
    for how in erasing.HOWS:
        assert possible(subject, batch, how) == how
    with pytest.raises(errors.OptionError, match="how='drop'"):
        possible(subject, batch, "drop")


@pytest.mark.parametrize("how", ["delete", "mask", "pad", "attention"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("at_once", [7, 2048])
def test_removals_come_back_in_their_order(decoder, tokenizer, monkeypatch, how, side, at_once):
    """However many run together: as one by one, without padding. Some remove nothing, some much, one comes twice."""
    subject = regard.causal(decoder, tokenizer, padding_side=side)
    monkeypatch.setattr(erasing, "ROWS_AT_ONCE", at_once)
    batch = subject.encode(TEXTS)
    first = [features.rows[0] for features in batch.features]
    removals = [(2, (1,)), (1, (3, 4, 5, 6)), (0, ()), (1, ()), (0, (2,)), (1, (3, 4, 5, 6)), (0, (1, 2, 3)), (1, (9,))]
    shifted = [(example, tuple(first[example] + row for row in rows)) for example, rows in removals]
    outputs = without(subject, batch, shifted, how, lone)
    for (example, rows), output in zip(removals, outputs, strict=True):
        alone = subject.encode(TEXTS[example])
        (expected,) = without(subject, alone, [(0, rows)], how, lone)
        torch.testing.assert_close(output, expected, rtol=1e-9, atol=1e-9)


def test_inputs_of_like_length_run_together(subject, batches, monkeypatch):
    """A text of three words is not padded to one of a hundred."""
    texts = ["so dull a film", "so " * 50, "so dull"]
    batch = subject.encode(texts)
    removals = [(example, (row,)) for example in range(3) for row in range(1, int(batch.real[example].sum()) - 1)]
    for how, shorter in (("delete", 1), ("mask", 0), ("pad", 0)):
        seen = batches(subject)
        monkeypatch.setattr(erasing, "ROWS_AT_ONCE", 52)
        without(subject, batch, removals, how, lone)
        assert sum(map(len, seen)) == len(removals)
        wasted = sum(int((~one.real).sum()) for one in seen)
        assert wasted <= 4 * (52 - 4), "only where a batch has both"
        assert all(one.real.any(0).all() for one in seen), "no row is padding in all"
        assert max(one.real.shape[1] for one in seen) == 52 - shorter
        assert all(one.real.numel() <= 52 for one in seen)


def test_only_the_examples_that_lose_attention_are_run(subject, batches):
    batch = subject.encode(TEXTS)
    seen = batches(subject)
    outputs = without(subject, batch, [(2, (1,)), (2, ())], "attention", lone)
    own = [one for one in seen if one.real.shape == batch.real[2:].shape or one.real.shape[1] == batch.real.shape[1]]
    assert all(one.inputs["input_ids"][0].tolist() == batch.inputs["input_ids"][2].tolist() for one in own)
    torch.testing.assert_close(outputs[1], regard.trace(subject, TEXTS[2]).output[0], rtol=1e-9, atol=1e-9)


def test_nothing_to_remove(subject):
    assert without(subject, subject.encode(TEXTS), [], "delete", lone).shape == (0,)


class Basket(nn.Module):
    """Numbers, some of which are not there, and a first row that always is."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 6), nn.Linear(6, 3)

    def forward(self, x, real):
        z = self.embed(torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], 1)[..., None]).sin()
        return self.head(nn.functional.scaled_dot_product_attention(z, z, z, real[:, None])[:, 0])


@pytest.fixture
def basket():
    torch.manual_seed(0)
    return regard.module(
        seeded(Basket), lambda model, x, real: model(x, real), features=["[CLS]", *"abcd"], special_features=["[CLS]"],
        readout="first", padding=lambda x, real: real, baseline=torch.tensor([0.3, 0.1, -0.4, 1.0]),
    )  # fmt: skip


@pytest.mark.parametrize("method", ["leave_one_out", "shapley"])
@pytest.mark.parametrize("how", ["mask", "attention"])
def test_a_module_with_padding(basket, method, how):
    """Its rows cannot be deleted, and need not be; an example without any feature has no scores."""
    x = torch.randn(3, 4, dtype=torch.float64)
    real = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 0, 1], [1, 0, 0, 0, 0]]).bool()
    found = regard.explain(basket, (x, real), method=method, how=how)
    assert [len(why.scores) for why in found] == [5, 3, 1]
    for example, why in enumerate(found):
        (alone,) = regard.explain(basket, (x[[example]], real[[example]]), method=method, how=how)
        torch.testing.assert_close(torch.tensor(why.scores), torch.tensor(alone.scores), rtol=1e-9, atol=1e-9)
    assert found[2].scores.tolist() == [0]
    if method == "leave_one_out" and how == "mask":
        for column, score in ((1, found[1].scores[1]), (3, found[1].scores[2])):
            other = x[[1]].clone()
            other[0, column] = basket.baseline[column]
            with torch.no_grad():
                one, two = (basket.model(given, real[[1]]).softmax(-1) for given in (x[[1]], other))
            assert score == pytest.approx(float((one - two).abs().sum() / 2), rel=1e-6)


def test_a_baseline_must_fit(basket):
    x, real = torch.randn(2, 4), torch.ones(2, 5, dtype=torch.bool)
    with pytest.raises(errors.OptionError, match=r"baseline has shape \(3,\).*each of the 4 features"):
        regard.module(
            basket.model, lambda model, x: x, features=["[CLS]", *"abcd"], special_features=["[CLS]"],
            readout="first", baseline=torch.zeros(3),
        )  # fmt: skip
    with pytest.raises(errors.NotServed, match="how='mask'"):
        regard.module(
            basket.model, lambda model, x, real: model(x, real), features=["[CLS]", *"abcd"], readout="first"
        ).without(basket.encode((x, real)), real, "mask")  # fmt: skip


class Asked(nn.Module):
    """Two questions that look at the columns of a table."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(1, 6), nn.Linear(6, 3)

    def forward(self, questions, x):
        z = self.embed(x[..., None]).sin()
        return self.head(nn.functional.scaled_dot_product_attention(questions, z, z)[:, 0])


def test_of_two_sequences_the_source_has_the_baseline():
    """Special features of both are counted where they are."""
    model, mean = seeded(Asked), torch.tensor([0.5, -1.0, 2.0])
    subject = regard.module(
        model, lambda model, questions, x: model(questions, torch.cat([x.new_ones(len(x), 1), x], 1)),
        features=["what", "why"], source=["[BIAS]", *"abc"], special_features=["[BIAS]", "why"], readout="first",
        baseline=mean,
    )  # fmt: skip
    questions, x = torch.randn(3, 2, 6, dtype=torch.float64), torch.randn(3, 3, dtype=torch.float64)
    for example, why in enumerate(regard.explain(subject, (questions, x), method="leave_one_out")):
        expected = [0.0]
        for column in range(3):
            other = x[[example]].clone()
            other[0, column] = mean[column]
            with torch.no_grad():
                one, two = (
                    subject.call(model, questions[[example]], given).softmax(-1) for given in (x[[example]], other)
                )
            expected.append(float((one - two).abs().sum() / 2))
        assert why.parts == {"source": 4}
        torch.testing.assert_close(torch.tensor(why.scores), torch.tensor(expected, dtype=torch.float64))
    with pytest.raises(
        errors.NotServed, match=r"how='mask': baseline= stands in for numbers \(example, 3\), and 2 inputs"
    ):
        subject.without(subject.encode({"questions": questions, "x": x, "y": x}), torch.ones(3, 4).bool(), "mask")


# --- what subjects make of a batch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_that_are_taken_out(decoder, tokenizer, side):
    """Ids, masks, positions and features move together; padding that is not needed any more is gone, too."""
    subject = regard.causal(decoder, tokenizer, padding_side=side)
    batch = subject.encode(["dull, so film", "so"])
    gone = torch.zeros_like(batch.real)
    gone[0, [1, 3]] = True
    part = subject.without(batch, gone, "delete")
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    comma, film, so = tokenizer.convert_tokens_to_ids([",", "film", "so"])
    pad = tokenizer.pad_token_id
    short = [pad, cls, so, sep] if side == "left" else [cls, so, sep, pad]
    assert part.inputs["input_ids"].tolist() == [[cls, comma, film, sep], short]
    real = [False, True, True, True] if side == "left" else [True, True, True, False]
    assert part.real.tolist() == [[True] * 4, real]
    assert part.inputs["attention_mask"].bool().tolist() == part.real.tolist()
    positions = part.inputs["position_ids"]
    assert positions[0].tolist() == [0, 1, 2, 3]
    assert positions[1][part.real[1]].tolist() == [0, 1, 2]
    assert part.features[0] == Features(
        ("[CLS]", ",", "film", "[SEP]"), (0, 1, 2, 3), ("dull", ",", "so", "film"), (None, 1, 3, None)
    )
    assert part.features[1].rows == ((1, 2, 3) if side == "left" else (0, 1, 2))
    again = subject.without(part, torch.zeros_like(part.real), "delete")
    assert again.features == part.features
    assert torch.equal(again.inputs["input_ids"], part.inputs["input_ids"])
    assert batch.inputs["input_ids"].shape[1] == 6, "the batch is as it was"


def test_another_token_in_its_place(subject, tokenizer):
    batch = subject.encode(["so dull", "film"])
    gone = torch.zeros_like(batch.real)
    gone[0, 1] = gone[1, 1] = True
    for how, token in (("mask", tokenizer.mask_token_id), ("pad", tokenizer.pad_token_id)):
        part = subject.without(batch, gone, how)
        assert part.inputs["input_ids"][:, 1].tolist() == [token, token]
        assert torch.equal(part.inputs["attention_mask"], batch.inputs["attention_mask"])
        assert torch.equal(part.real, batch.real)
        assert part.features == batch.features


def test_a_source_is_shortened_and_what_was_produced_is_not(tokenizer):
    subject = regard.seq2seq(t5(tokenizer), tokenizer)
    batch = subject.encode([("so dull a film", "it is"), ("so", "it ends")])
    gone = torch.zeros_like(batch.source.real)
    gone[0, [1, 2]] = True
    part = subject.without(batch, gone, "delete")
    assert part.source.features[0].tokens == ("[CLS]", "a", "film", "[SEP]")
    assert part.source.real.tolist() == [[True] * 4, [True, True, True, False]]
    assert torch.equal(part.inputs["decoder_input_ids"], batch.inputs["decoder_input_ids"])
    assert torch.equal(part.real, batch.real)
    assert part.said == batch.said


@pytest.mark.parametrize("marks", [False, True])
def test_a_pooled_text_keeps_a_row_to_attend_to(marks):
    names = ["<pad>", "<unk>", *(["<sos>", "<eos>"] if marks else []), "so", "good"]
    vocabulary = {name: index for index, name in enumerate(names)}
    subject = regard.pooled(regard.models.AttentionClassifier(words=len(names), embedding=4, hidden=4), vocabulary)
    batch = subject.encode(["so good", "good"])
    words = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]]) if marks else torch.tensor([[1, 1], [1, 0]])
    part = subject.without(batch, words.bool(), "delete")
    expected = [vocabulary["<sos>"], 0, vocabulary["<eos>"]] if marks else [0]
    assert part.inputs["ids"].tolist() == [expected, expected]
    assert part.inputs["attend"].tolist() == [[False, True, False] if marks else [True]] * 2
    assert part.inputs["real"].all()
    assert regard.trace(subject, part).output.isfinite().all()


# --- what is made of outputs ----------------------------------------------------------------------------------------


def moved(subject, output, before):
    """The total variation that is found between two outputs, by a subject whose trace has the second."""
    trace = replace(regard.trace(subject, ["so"] * len(before)), output=before, target=0)
    return Values(trace).moved(output, [*range(len(before))])


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ("softmax", lambda a, b: (a.softmax(-1) - b.softmax(-1)).abs().sum(-1) / 2),
        ("sigmoid", lambda a, b: (a.sigmoid() - b.sigmoid()).abs().mean(-1)),
        ("binary", lambda a, b: (a.sigmoid() - b.sigmoid()).abs()[:, 0]),
        ("regression", lambda a, b: (a - b).abs()[:, 0]),
    ],
)
def test_how_far_outputs_are_apart(head, expected):
    vocabulary = {"<pad>": 0, "<unk>": 1, "so": 2}
    columns = 1 if head in ("binary", "regression") else 3
    task = {"classes": columns, "task": "multiclass"} if columns > 1 else {}
    model = regard.models.AttentionClassifier(words=3, embedding=4, hidden=4, **task)
    labels = ["a", "b", "c"] if columns == 3 else ["no", "yes"] if head == "binary" else ["y"]
    subject = regard.pooled(model, vocabulary, output=head, labels=labels)
    one, two = torch.randn(4, columns).double() * 3, torch.randn(4, columns).double() * 3
    one[0] = two[0]
    found = moved(subject, one, two) if head != "regression" else Values(
        replace(regard.trace(subject, ["so"] * 4), output=two)
    ).moved(one, [0, 1, 2, 3])  # fmt: skip
    torch.testing.assert_close(found, expected(one, two))
    assert found[0] == 0
    if head in ("softmax", "binary"):
        far = moved(
            subject,
            torch.full_like(one, -50).index_fill(1, torch.tensor([0]), 50),
            -torch.full_like(one, -50).index_fill(1, torch.tensor([0]), 50),
        )
        torch.testing.assert_close(far, torch.ones(4).double())


def test_the_target_is_the_one_that_was(subject):
    """Also in half precision, of examples in any order, and beside targets that are no classes."""
    trace = regard.trace(subject, TEXTS, target=[None, (0, 1), 2], of="probability")
    values = Values(trace)
    first = int(trace.output[0].argmax())
    other = torch.zeros(4, 3, dtype=torch.float64)
    other[:, (first + 1) % 3] = 9  # something else is predicted now
    chances = other[0].softmax(-1)
    found = values.scores(other, [2, 0, 1, 0])
    expected = torch.stack([chances[2], chances[first], chances[0] - chances[1], chances[first]])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(values.fallen(other, [2, 0, 1, 0]), trace.score.values[[2, 0, 1, 0]] - expected)
    assert values.scores(other.bfloat16(), [2, 0, 1, 0]).dtype == torch.float32


def test_no_scalar_to_explain(tokenizer):
    from transformers import BertModel

    encoder = regard.text(bert(tokenizer, BertModel), tokenizer)
    with pytest.raises(errors.WrongTarget, match="needs a function of its output"):
        Values(regard.trace(encoder, "so"))


def test_outputs_that_are_not_finite(subject, monkeypatch):
    plain = type(subject).forward
    monkeypatch.setattr(type(subject), "forward", lambda self, batch: plain(self, batch) / 0)
    with pytest.raises(errors.NonFinite, match="output without some features"):
        without(subject, subject.encode("so"), [(0, (1,))], "delete", lone)
