"""Rankings against Jain & Wallace's gradient and leave-one-out, written out."""

from __future__ import annotations

import copy
import dataclasses
import math
import zlib

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from polar import KINDS, LONG, Literal, bert, examples, of_kind, toy
from scipy import stats

import regard
from regard import catalog, errors
from regard.data import Dataset, Example
from regard.importance import over_seeds
from regard.types import Scores


def constant_attention(module, query, key, value, attention_mask, scaling, **_):
    """Weights that no gradient passes through."""
    scores = query @ key.mT * scaling
    weights = (scores if attention_mask is None else scores + attention_mask).softmax(-1).detach()
    return (weights @ value).transpose(1, 2).contiguous(), weights


hf.AttentionInterface.register("constant", constant_attention)


def test_supported_where_attention_is_the_decision():
    found = regard.trial(toy("decisive"), examples(), "agreement")
    assert found.supported is True
    assert found.statistic > 0.9
    assert found.interval.low > found.reference["random"].high
    assert found.margin.value == pytest.approx(found.statistic - found.reference["ceiling"].value / 2)
    assert found.criterion == "consistent"


def test_not_supported_where_attention_is_irrelevant():
    found = regard.trial(toy("irrelevant"), examples(), "agreement")
    assert found.supported is False
    assert found.interval.high < found.reference["asked for"].value


def test_no_verdict_where_the_references_do_not_agree(tokenizer):
    found = regard.trial(regard.text(bert(tokenizer), tokenizer), examples(12), "agreement")
    assert found.reference["ceiling"].low <= found.reference["random"].high
    assert found.supported is None
    assert "no yardstick" in found.sentence


def test_against_gradient_and_leave_one_out_written_out(tokenizer):
    model = bert(tokenizer)
    data = examples(8, more=LONG)
    found = regard.trial(regard.text(model, tokenizer), data, "agreement", batch_size=3)
    for one, row in zip(data, found.values.to_dict(orient="records"), strict=True):
        literal = Literal(model, tokenizer, one.input)
        raw, pieces = literal.raw(), literal.pieces
        # g_t = |Σ_d ∂ŷ/∂x_td · x_td|, attention detached
        x = model.get_input_embeddings()(torch.tensor([literal.ids])).detach().requires_grad_()
        model.set_attn_implementation("constant")
        model(inputs_embeds=x).logits[0].softmax(-1)[literal.said].backward()
        model.set_attn_implementation("sdpa")
        model.zero_grad()
        tokens = (x.grad * x)[0].sum(-1).abs()
        gradient = [tokens[some].sum().item() for some in pieces]
        # ½ Σ |ŷ without t − ŷ|
        left = [np.abs(literal.without([word]) - literal.before).sum() / 2 for word in range(len(pieces))]
        for pair, x, y in (
            ("tau_gradient", raw, gradient),
            ("tau_leave_one_out", raw, left),
            ("ceiling", gradient, left),
        ):
            tau = stats.kendalltau(x, y)
            assert row[pair] == pytest.approx(tau.statistic, abs=1e-9)
            assert row[f"p_{pair.removeprefix('tau_')}"] == pytest.approx(tau.pvalue, abs=1e-9)
        assert row["tau"] == pytest.approx((row["tau_gradient"] + row["tau_leave_one_out"]) / 2)
        k = math.ceil(len(pieces) / 5)
        top = {*np.argsort(gradient)[-k:].tolist()} & {*np.argsort(raw)[-k:].tolist()}
        assert row["top_k_gradient"] == len(top) / k
    through = regard.trial(regard.text(model, tokenizer), data, "agreement", through_attention=True)
    assert (through.values["tau_gradient"] != found.values["tau_gradient"]).any()
    assert through.values["tau_leave_one_out"].tolist() == pytest.approx(found.values["tau_leave_one_out"].tolist())


def test_the_tables_say_what_the_values_say():
    found = regard.trial(toy("decisive"), examples(), "agreement")
    pairs = found.tables["pairs"].set_index(["pair", "measure"])
    assert pairs.loc[("raw – gradient", "tau"), "significant"] == (found.values["p_gradient"] <= 0.05).mean()
    assert pairs.loc[("gradient – leave_one_out", "tau"), "value"] == pytest.approx(found.reference["ceiling"].value)
    assert pairs.loc[("raw – gradient", "top_k"), "value"] == pytest.approx(found.values["top_k_gradient"].mean())
    assert pairs.loc[("random – gradient", "weighted"), "n"] == 40
    some = found.values.query("predicted == 'negative'")
    row = found.tables["by class"].set_index(["predicted", "pair"]).loc[("negative", "raw – leave_one_out")]
    assert row["tau"] == pytest.approx(some["tau_leave_one_out"].mean())
    assert row["deviation"] == pytest.approx(some["tau_leave_one_out"].std(ddof=0))
    assert row["significant"] == (some["p_leave_one_out"] <= 0.05).mean()
    assert row["n"] == len(some)
    assert "global" not in found.tables


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_subject_in_any_batches(kind, tokenizer):
    subject, data = of_kind(kind, tokenizer)
    found, again = (regard.trial(subject, data, "agreement", batch_size=size) for size in (12, 5))
    numbers = [one.values.drop(columns=["example", "predicted"]).to_numpy() for one in (found, again)]
    np.testing.assert_allclose(*numbers, atol=1e-5)
    assert len(found.values) == 12
    assert np.isfinite(found.statistic)


def test_tables_have_a_ranking_of_all_examples_together(tokenizer):
    subject, data = of_kind("table", tokenizer, 30)
    found = regard.trial(subject, data, "agreement")
    frame = data.frame()[[*data.columns]]
    means = {}
    for name, options in (("raw", {}), ("gradient", {"through_attention": False}), ("leave_one_out", {})):
        whys = regard.explain(subject, frame, method=name, **options)
        means[name] = np.mean([np.abs(why.scores[1:]) for why in whys], axis=0)  # without [CLS]
    means["permutation"] = np.mean([
        _moved_by_other_rows(subject, frame, place, found.values["example"][place]) for place in range(len(frame))
    ], axis=0)  # fmt: skip
    assert {f"raw – {name}" for name in means} - {"raw – raw"} <= {*found.tables["global"]["pair"]}
    for pair, row in found.tables["global"].set_index("pair").iterrows():
        if "random" not in pair and "integrated" not in pair:
            x, y = pair.split(" – ")
            assert row["spearman"] == pytest.approx(stats.spearmanr(means[x], means[y]).statistic)
        assert -1 <= row["low"] <= row["high"] <= 1
    columns = found.tables["columns"]
    assert [*columns["by"].unique()] == ["raw", "gradient", "leave_one_out", "permutation"]
    for name, some in columns.groupby("by"):
        if name in means:
            assert some["value"].tolist() == pytest.approx(sorted(means[name], reverse=True), abs=1e-6)
        assert some["rank"].tolist() == [*range(1, len(some) + 1)]
        assert (some["low"] <= some["value"]).all()
        assert (some["value"] <= some["high"]).all()
    assert "ranks the columns as permuting them does with Spearman's ρ" in found.sentence
    bars, ranks = (found.plot(f"columns, {which}") for which in ("overall", "by method"))
    assert bars.values.tolist() == pytest.approx(columns["value"][: len(frame.columns)].tolist())
    assert ranks.values.shape == (len(frame.columns), 4)
    again = regard.trial(subject, data, "agreement").tables["global"]
    pd.testing.assert_frame_equal(again, found.tables["global"])


def _moved_by_other_rows(subject, frame, place, name):
    """½ Σ |p − p with the cell of another row|, mean over five rows drawn by lot, for each column."""
    model = copy.deepcopy(subject.model).double()

    def says(rows):
        with torch.no_grad():
            return model(torch.tensor(np.array(rows)), None).softmax(-1).numpy()

    row, moved = frame.iloc[place], []
    others = np.random.default_rng([0, zlib.crc32(name.encode())]).integers(len(frame), size=5)
    for column in frame.columns:
        changed = [row.where(row.index != column, frame.iloc[other]) for other in others]
        moved.append(np.mean(np.abs(says(changed) - says([row])).sum(-1) / 2))
    return np.array(moved)


@pytest.mark.parametrize("method", ["random", "gradient"])
def test_each_pair_of_rankings_is_there_once(method, tokenizer):
    subject, data = of_kind("table", tokenizer, 12)
    pairs = regard.trial(subject, data, "agreement", method=method).tables["global"]["pair"]
    assert pairs.is_unique


def test_seeds_of_training_have_a_spread(tokenizer):
    tables = []
    for seed in range(3):
        subject, data = of_kind("table", tokenizer, 12)
        torch.manual_seed(seed)
        for weights in subject.model.parameters():
            torch.nn.init.normal_(weights, std=0.3)
        tables.append(regard.trial(subject, data, "agreement").tables["global"])
    found = over_seeds(tables).set_index("pair").loc["raw – permutation"]
    each = [table.set_index("pair").loc["raw – permutation", "spearman"] for table in tables]
    assert len({*each}) > 1
    assert found["spearman"] == pytest.approx(np.mean(each))
    assert found["deviation"] == pytest.approx(np.std(each, ddof=1))
    assert (found["least"], found["most"], found["n"]) == (min(each), max(each), 3)


def test_a_reference_is_not_compared_with_itself():
    found = regard.trial(toy("decisive"), examples(), "agreement", method="leave_one_out")
    np.testing.assert_allclose(found.values["tau_leave_one_out"], 1)
    assert found.values["tau"].tolist() == found.values["tau_gradient"].tolist()
    np.testing.assert_allclose(found.values["tau"], found.values["ceiling"])
    assert "with itself it is not compared" in found.sentence


def test_an_explanation_without_an_order_is_counted_or_refused(monkeypatch):
    subject, data = toy("decisive"), examples()
    with pytest.raises(errors.InputError, match="uniform gives all words of an example the same score"):
        regard.trial(subject, data, "agreement", method="uniform")
    found = regard.trial(subject, Dataset.of([*data, Example("good", id="one")]), "agreement")
    assert found.interval.undefined == 1
    assert np.isnan(found.values["tau"].iloc[-1])
    assert any("1 examples leave the statistic undefined" in line for line in found.warnings)
    method = catalog.found()["leave_one_out"]
    nothing = dataclasses.replace(method, function=lambda trace, *, how=None: Scores(0.0 * trace.batch.real))
    monkeypatch.setitem(catalog.found(), "leave_one_out", nothing)
    with pytest.raises(errors.InputError, match="leave_one_out gives all words"):
        regard.trial(subject, data, "agreement")


def test_bad_options():
    with pytest.raises(errors.OptionError, match="through_attention='no' must be True or False"):
        regard.trial(toy("decisive"), examples(8), "agreement", through_attention="no")
