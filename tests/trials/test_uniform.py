"""Attention that looks at everything alike, against the same written out, and against models whose answer is known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from polar import COLUMNS, KINDS, LONG, bert, examples, of_kind, toy

import regard
from regard import draw
from regard.data import Dataset, Example
from regard.errors import OptionError
from regard.models.toys import POLARITY


def logits(model, tokenizer, text, flat):
    """What a BERT says when the given (layer, head) look at all tokens alike: its own modules, one after the other."""
    with torch.no_grad():
        state = model.bert.embeddings(tokenizer(text, return_tensors="pt")["input_ids"])
        for number, layer in enumerate(model.bert.encoder.layer):
            own = layer.attention.self
            q, k, v = (
                part(state).unflatten(-1, (own.num_attention_heads, -1)).transpose(1, 2)
                for part in (own.query, own.key, own.value)
            )
            weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)  # example head query key
            for head in range(own.num_attention_heads):
                if (number, head) in flat:
                    weights[:, head] = 1 / weights.shape[-1]
            mixed = (weights @ v).transpose(1, 2).flatten(2)
            after = layer.attention.output(mixed, state)
            state = layer.output(layer.intermediate(after), after)
        return model.classifier(model.bert.pooler(state))[0]


def moved(model, tokenizer, text, flat):
    before, after = (logits(model, tokenizer, text, some).softmax(-1) for some in ((), flat))
    return float((before - after).abs().sum() / 2)


@pytest.fixture(scope="module")
def small(tokenizer):
    return bert(tokenizer)


@pytest.fixture(scope="module")
def data():
    labels = ["LABEL_0", "LABEL_1", "LABEL_2"]
    return Dataset.of([Example(one.input, labels[at % 3], id=one.id) for at, one in enumerate(examples(9, more=LONG))])


@pytest.fixture(scope="module")
def found(tokenizer, small, data):
    return regard.trial(regard.text(small, tokenizer), data, "uniform")


def test_attention_that_decides_is_missed():
    found = regard.trial(toy("decisive"), examples(), "uniform")
    assert found.supported is True
    assert found.margin.low == pytest.approx(found.interval.low - 0.05)
    assert found.reference["attention removed"].low > 0.05
    assert found.reference["counts as a change"].value == 0.05


def test_attention_that_is_irrelevant_is_not():
    found = regard.trial(toy("irrelevant"), examples(), "uniform")
    assert found.supported is False
    assert found.statistic == pytest.approx(0, abs=1e-6)
    assert not found.values["changed"].any()


def test_a_pool_is_the_mean_of_its_values():
    data = examples(8)
    found = regard.trial(regard.pooled(regard.models.toys.decisive().double()), data, "uniform")
    for row, one in zip(found.values.itertuples(), data, strict=True):
        values = np.array([POLARITY[word] for word in one.input.split()])
        weights = np.exp(6 * np.abs(values))
        before, after = (1 / (1 + np.exp(-1.25 * logit)) for logit in (weights @ values / weights.sum(), values.mean()))
        assert row.moved == pytest.approx(abs(before - after), abs=1e-6)
        assert row.moved == pytest.approx(row.moved_at_0, abs=1e-12)
        assert row.changed == ((before > 0.5) != (after > 0.5))


def test_all_sites_each_site_and_each_head_of_a_bert(tokenizer, small, data, found):
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    alone = np.zeros(len(heads))
    for row, one in zip(found.values.itertuples(), data, strict=True):
        said = [int(logits(small, tokenizer, one.input, some).argmax()) for some in ((), heads)]
        assert row.moved == pytest.approx(moved(small, tokenizer, one.input, heads), abs=1e-6)
        for layer in range(2):
            expected = moved(small, tokenizer, one.input, [pair for pair in heads if pair[0] == layer])
            assert getattr(row, f"moved_at_{layer}") == pytest.approx(expected, abs=1e-6)
        assert row.changed == (said[0] != said[1])
        assert [row.correct_before, row.correct_uniform] == [f"LABEL_{number}" == one.label for number in said]
        alone += [moved(small, tokenizer, one.input, [pair]) / len(data) for pair in heads]
    table = found.tables["heads"]
    assert list(zip(table["site"], table["head"], strict=True)) == heads
    np.testing.assert_allclose(table["moved"], alone, atol=1e-6)
    assert alone.min() > 1e-4, "every head matters a little"
    assert found.statistic == pytest.approx(found.values["moved"].mean())


def test_the_table_of_sites_has_intervals_and_what_accuracy_is_lost(found):
    table = found.tables["sites"]
    for row in table.itertuples():
        assert row.moved == pytest.approx(found.values[f"moved_at_{row.site}"].mean())
        assert row.moved_low <= row.moved <= row.moved_high
        lost = (found.values["correct_before"] - found.values[f"correct_at_{row.site}"]).mean()
        assert row.accuracy_lost == pytest.approx(lost)
        assert row.accuracy_lost_low <= row.accuracy_lost <= row.accuracy_lost_high
    assert table["name"].tolist() == [f"bert.encoder.layer.{layer}.attention.self" for layer in range(2)]
    lost = (found.values["correct_before"] - found.values["correct_uniform"]).mean()
    assert f"accuracy fell by {lost:.3f}" in found.sentence


def test_all_sites_are_taken_unless_some_are_named(tokenizer, small, data, found):
    subject = regard.text(small, tokenizer)
    assert [one["number"] for one in found.settings["edited"]] == [0, 1]
    assert {one["rows"] for one in found.settings["edited"]} == {"all"}
    last = regard.trial(subject, data, "uniform", sites=[1])
    assert [one["number"] for one in last.settings["edited"]] == [1]
    np.testing.assert_allclose(last.values["moved"], found.values["moved_at_1"], atol=1e-9)
    assert last.plot("each head alone").values.shape == (2, 4)


def test_without_the_profile_the_rest_is_the_same(tokenizer, small, data, found):
    less = regard.trial(regard.text(small, tokenizer), data, "uniform", profile=False)
    assert [*less.tables] == ["sites"]
    pd.testing.assert_frame_equal(less.values, found.values, atol=1e-6)


def test_without_labels_or_with_some_there_is_no_accuracy_or_some():
    plain = regard.trial(toy("decisive"), examples(labels=False), "uniform")
    assert not [column for column in plain.values if column.startswith("correct")]
    assert "accuracy" not in plain.sentence
    assert "accuracy_lost" not in plain.tables["sites"]
    some = Dataset.of(
        [Example(one.input, one.label if at % 2 else None, id=one.id) for at, one in enumerate(examples())]
    )
    half = regard.trial(toy("decisive"), some, "uniform")
    assert half.values["correct_before"].isna().sum() == len(some) // 2
    assert half.values["moved"].notna().all()
    assert "accuracy fell by" in half.sentence


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_subject(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer, count=6)
    found = regard.trial(subject, data, "uniform")
    assert len(found.values) == len(data)
    assert found.statistic > 0
    assert ("changed" in found.values) == (kind != "regression")
    assert len(found.tables["heads"]) == sum(one["heads"] for one in found.settings["edited"])
    assert found.plot("each head alone").values.max() == pytest.approx(found.tables["heads"]["moved"].max())


def test_an_encoder_without_classes(minilm):
    data = examples(6, labels=False)
    found = regard.trial(minilm, data, "uniform", target=minilm.similarity("a moving film"), profile=False)
    assert found.supported is True
    assert "changed" not in found.values
    assert len(found.tables["sites"]) == 6


@pytest.mark.parametrize("kind", ["pooled LSTM", "BERT", "decoder", "table"])
def test_the_batch_does_not_matter(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer, count=6)
    one, many = (regard.trial(subject, data, "uniform", batch_size=size) for size in (1, 32))
    columns = [column for column in one.values if column.startswith(("moved", "removed"))]
    np.testing.assert_allclose(one.values[columns], many.values[columns], atol=1e-5)
    np.testing.assert_allclose(one.tables["heads"]["moved"], many.tables["heads"]["moved"], atol=1e-5)


def test_a_table_looks_only_at_what_it_may(tokenizer):
    subject, data = of_kind("table", tokenizer)
    found = regard.trial(subject, data, "uniform", sites=[1], profile=False).values
    rows = torch.tensor([[one.input[name] for name in COLUMNS] for one in data], dtype=torch.float64)
    flat = torch.full((1, 1, 1, len(COLUMNS) + 1), 1 / (len(COLUMNS) + 1), dtype=torch.float64)
    before, after = (
        output.softmax(-1)
        for output in (subject.forward(subject.encode(rows)), regard.intervene(subject, rows, regard.edits.replace(flat, sites=1, rows="all")))
    )  # fmt: skip
    np.testing.assert_allclose(found["moved"], (before - after).abs().sum(-1).detach() / 2, atol=1e-6)


@pytest.mark.parametrize("options", [{"epsilon": 0}, {"epsilon": 1.0}, {"epsilon": True}, {"profile": 1}])
def test_options_out_of_range(options):
    ((name, value),) = options.items()
    with pytest.raises(OptionError, match=f"{name}={value!r}"):
        regard.trial(toy("decisive"), examples(), "uniform", **options)


def test_a_grid_marks_the_heads_that_are_not_there():
    table = pd.DataFrame({"site": [1, 1, 3], "head": [0, 1, 0], "moved": [0.1, 0.2, 0.3]})
    picture = draw.heads(table, layer="site", head="head", value="moved", title="t", caption="c")
    assert picture.values.tolist() == [[0, 0], [0.1, 0.2], [0, 0], [0.3, 0]]
    assert str(picture.chart.to_dict()).count("u2013") == 2 * 5, "shown and said"
