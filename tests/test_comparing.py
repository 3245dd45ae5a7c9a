"""Methods side by side: every number of a league against a literal re-computation, and what must not be claimed."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch

import regard
from regard import catalog, errors
from regard.comparison import Numbers, summarise
from regard.data import Dataset, Example
from regard.measures import agreement, agreements, kendall
from regard.rationales import auprc, ranked
from regard.wording import on_words, truth_on

TEXTS = [
    "so so good so film",
    "the awful the plot",
    "a dull film so",
    "superb",
    "good bad good so the",
    "the film bad so so so",
]
SHARES = (0.2, 0.5)


@pytest.fixture(scope="module")
def subject():
    return regard.pooled(regard.models.toys.decisive())


def marked(text):
    """The words that have a polarity are the truth."""
    return tuple(word in ("good", "awful", "dull", "superb", "bad") for word in text.split())


@pytest.fixture(scope="module")
def data():
    return Dataset.of([Example(text, rationale=marked(text), id=f"t{i}") for i, text in enumerate(TEXTS)])


@pytest.fixture(scope="module")
def found(subject, data):
    return regard.compare(subject, data, methods=["raw", "gradient", "leave_one_out", "uniform"], bins=SHARES)


def probability(subject, text, label):
    with torch.no_grad():
        return float(subject.score(subject.forward(subject.encode(text)), label, "probability").values)


def test_comprehensiveness_and_sufficiency_one_text_at_a_time(subject, data, found):
    for method in ("raw", "gradient", "leave_one_out", "uniform", "random"):
        comprehensiveness, sufficiency = [], []
        for place, text in enumerate(TEXTS):
            words = text.split()
            why = regard.explain(subject, text, method=method)
            label, before = why.target, why.probability
            order = ranked(why.scores, f"t{place}", 0)
            falls = {True: [], False: []}
            for share in SHARES:
                top = set(order[: math.ceil(share * len(words))].tolist())
                for removed in (True, False):
                    left = [word for i, word in enumerate(words) if (i in top) != removed]
                    falls[removed].append(before - probability(subject, " ".join(left) or "<pad>", label))
            comprehensiveness.append(np.mean(falls[True]))
            sufficiency.append(np.mean(falls[False]))
        row = found.league.set_index("method").loc[method]
        assert row["comprehensiveness"] == pytest.approx(np.mean(comprehensiveness), abs=1e-6)
        assert row["sufficiency"] == pytest.approx(np.mean(sufficiency), abs=1e-6)
        assert row["comprehensiveness_low"] <= row["comprehensiveness"] <= row["comprehensiveness_high"]


def test_auprc_and_agreement_against_the_measures(subject, found):
    whys = {name: [regard.explain(subject, text, method=name) for text in TEXTS] for name in ("raw", "gradient")}
    taus = [kendall(np.abs(a.scores), np.abs(b.scores)).value for a, b in zip(*whys.values(), strict=True)]
    row = found.agreement.query("method == 'raw' and other == 'gradient' and measure == 'tau'").iloc[0]
    assert row["undefined"] == int(np.isnan(taus).sum()) == 1, "a text of one word has no order"
    assert row["n"] == len(TEXTS) - 1
    assert row["value"] == pytest.approx(np.nanmean(taus))
    areas = [
        auprc([-ranked(why.scores, f"t{i}", 0).argsort()], [np.array(marked(text))])[0]
        for i, (why, text) in enumerate(zip(whys["raw"], TEXTS, strict=True))
    ]
    assert found.league.set_index("method").loc["raw", "auprc"] == pytest.approx(np.mean(areas))


@pytest.mark.parametrize("size", [1, 2, 7, 30])
def test_all_pairs_at_once_are_the_pairs_one_by_one(size):
    lots = np.random.default_rng(size)
    scores = np.stack([lots.random(size), lots.integers(0, 3, size), np.ones(size), lots.exponential(size=size) ** 4])
    together = agreements(scores)
    for one in range(len(scores)):
        for other in range(len(scores)):
            expected = agreement(scores[one], scores[other])
            for measure, square in together.items():
                assert square[one, other] == pytest.approx(expected[measure], nan_ok=True), measure


def test_random_is_always_there_and_undefined_values_are_counted(found):
    assert set(found.league["method"]) == {"raw", "gradient", "leave_one_out", "uniform", "random"}
    undefined = found.agreement.query("method == 'raw' and other == 'uniform' and measure == 'tau'").iloc[0]
    assert undefined["undefined"] == len(TEXTS)
    assert undefined["n"] == 0
    assert math.isnan(found.matrix("tau").loc["raw", "uniform"])
    assert (np.diag(found.matrix("tau")) == 1).all()
    square = found.matrix("weighted").to_numpy()
    np.testing.assert_array_equal(square, square.T)


def numbers_of(values):
    """A league of methods that have these values of comprehensiveness."""
    numbers = Numbers(ids=[str(i) for i in range(40)], words=[("a", "b")] * 40, truth=[None] * 40)
    for label, mean in values.items():
        lots = np.random.default_rng(len(label))
        numbers.scores[label] = [lots.random(2) for _ in range(40)]
        numbers.comprehensiveness[label] = (mean + 0.05 * lots.standard_normal((40, 1))).tolist()
        numbers.sufficiency[label] = (-mean + 0.05 * lots.standard_normal((40, 1))).tolist()
        numbers.stability[label] = [1.0] * 40
    return numbers


def test_no_place_is_claimed_where_intervals_overlap():
    families = {"best": "attention", "second": "attention", "nearly": "attention", "random": "control"}
    numbers = numbers_of({"best": 0.9, "second": 0.5, "nearly": 0.501, "random": 0.1})
    settings = {"seed": 0, "bins": [0.5], "examples": 40, "of": 40, "how": "delete", "skipped_rows": 0}
    found = summarise(numbers, families=families, settings=settings, refused={})
    places = dict(zip(found.league["method"], found.league["comprehensiveness_place"], strict=True))
    assert places == {"best": 1, "second": 2, "nearly": 2, "random": 4}
    lower_is_better = dict(zip(found.league["method"], found.league["sufficiency_place"], strict=True))
    assert lower_is_better == places
    beats = dict(zip(found.league["method"], found.league["comprehensiveness_beats_random"], strict=True))
    assert beats == {"best": True, "second": True, "nearly": True, "random": False}
    chances = dict(zip(found.league["method"], found.league["comprehensiveness_p"], strict=True))
    assert chances["best"] < 0.001
    assert math.isnan(chances["random"]), "it is not compared with itself"
    assert "auprc" not in found.league, "there is no truth"
    assert found.chance is None


def test_one_trace_for_each_scalar_serves_all_methods(subject, data, monkeypatch):
    calls = []
    forward = type(subject).forward
    monkeypatch.setattr(
        type(subject), "forward", lambda self, batch: (calls.append(len(batch)), forward(self, batch))[1]
    )
    wanted = ["raw", "average", "rollout", "first_layer", "uniform", "position"]
    regard.compare(subject, data, methods=wanted, how="delete")  # the readout is known from here on
    calls.clear()
    regard.compare(subject, data, methods=wanted, how="delete")
    traced = calls.count(len(TEXTS))
    assert traced <= 3, "one trace, one for probabilities, and what is removed"
    assert found_forwards(subject, data, ["raw", "leave_one_out"]) == {
        "raw": 1.0,
        "leave_one_out": 1 + np.mean([len(t.split()) for t in TEXTS]),
        "random": 1.0,
    }


def found_forwards(subject, data, methods):
    league = regard.compare(subject, data, methods=methods).league
    return dict(zip(league["method"], league["forwards"], strict=True))


def test_methods_that_draw_lots_are_less_stable(subject, data):
    league = regard.compare(subject, data, methods=["raw", ("shapley", {"samples": 2})]).league.set_index("method")
    assert league.loc["raw", "stability"] == 1
    assert league.loc["random", "stability"] < 0.9
    assert "shapley samples=2" in league.index


def test_explanations_from_elsewhere_are_judged_like_the_rest(subject, data):
    oracle = [regard.adopt(subject, text, np.array(marked(text), float), name="oracle") for text in TEXTS]
    found = regard.compare(subject, data, methods=["raw"], adopted={"oracle": oracle})
    row = found.league.set_index("method").loc["oracle"]
    assert row["auprc"] == 1
    assert row["family"] == "adopted"
    with pytest.raises(errors.InputError, match="'oracle'.*1 explanations for 6"):
        regard.compare(subject, data, methods=["raw"], adopted={"oracle": oracle[:1]})
    with pytest.raises(errors.OptionError, match="raw"):
        regard.compare(subject, data, methods=["raw"], adopted={"raw": oracle})


def test_the_examples_on_which_two_methods_disagree_most(found):
    taus = [one["tau"] for one in found.disagreements]
    assert taus == sorted(taus)
    worst = found.disagreements[0]
    assert {worst["method"], worst["other"]} <= {"raw", "gradient", "leave_one_out"}, "controls are no explanations"
    numbers = [np.abs(worst["scores"][worst[name]]) for name in ("method", "other")]
    assert kendall(*numbers).value == pytest.approx(worst["tau"])


def test_a_page_holds_everything_and_escapes_it(tmp_path, subject):
    texts = ["so <script>alert(1)</script> good", "the film so bad", "so dull so film"]
    found = regard.compare(subject, texts, methods=["raw", "gradient", "leave_one_out"])
    page = found.to_html(tmp_path / "new" / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    for part in ("League table", "Do they agree?", "Disagreement 1", "leave_one_out", "comprehensiveness"):
        assert part in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    plain = found.to_dict()
    assert plain["league"][0]["method"] == "raw"
    assert pd.DataFrame(plain["values"]).shape[0] == 3 * 4


def test_methods_that_cannot_are_listed_with_the_reason(subject, data):
    found = regard.compare(subject, data)
    assert "value_zeroing" in found.refused
    assert "pool" in found.refused["value_zeroing"]
    assert "value_zeroing" not in set(found.league["method"])
    assert "Not served: value_zeroing" in found.note


def test_a_model_without_gradients_is_compared_by_the_methods_that_need_none(subject, data, monkeypatch):
    def refuses(*_):
        raise errors.NoGradient("it is quantised.")

    monkeypatch.setattr("regard.attention.tracing.must_differentiate", refuses)
    found = regard.compare(subject, data, methods=["raw", "attention_gradient", "gradient"])
    assert set(found.league["method"]) == {"raw", "random"}
    assert found.refused["attention_gradient"] == "attention_gradient: it is quantised."
    assert set(found.refused) == {"attention_gradient", "gradient"}


def test_a_method_that_fails_later_leaves_nothing_behind(subject, data, monkeypatch):
    calls = []
    method = catalog.found()["average"]

    def fails(trace):
        calls.append(trace)
        if len(calls) == 2:
            raise errors.NotServed("not this one.")
        return method.function(trace)

    monkeypatch.setitem(catalog.found(), "average", dataclasses.replace(method, function=fails))
    found = regard.compare(subject, data, methods=["raw", "average"], batch_size=2)
    assert len(calls) == 3  # batches are on their own: they may run elsewhere
    assert set(found.league["method"]) == {"raw", "random"}
    assert "not this one" in found.refused["average"]


def test_a_method_that_fails_at_once_is_not_tried_again(subject, data, monkeypatch):
    calls = []

    def fails(trace):
        calls.append(trace)
        raise errors.NotServed("not this one.")

    method = catalog.found()["average"]
    monkeypatch.setitem(catalog.found(), "average", dataclasses.replace(method, function=fails))
    found = regard.compare(subject, data, methods=["raw", "average"], batch_size=2)
    assert len(calls) == 1
    assert set(found.refused) == {"average"}


def test_two_processes_give_the_same_bits(subject, data):
    asked = {"methods": ["raw", "leave_one_out"], "batch_size": 2, "threads": 1}
    with pytest.raises(errors.OptionError, match="threads=0"):
        regard.compare(subject, data, threads=0)
    one, two = (regard.compare(subject, data, **asked, workers=workers) for workers in (1, 2))
    pd.testing.assert_frame_equal(one.values, two.values, check_exact=True)
    pd.testing.assert_frame_equal(one.league, two.league, check_exact=True)
    assert one.settings == two.settings


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"methods": ["rolout"]}, "Did you mean 'rollout'"),
        ({"methods": [("raw", {"laier": 1})]}, "raw has no such option"),
        ({"examples": 0}, "examples=0"),
        ({"bins": [1.5]}, "bins="),
        ({"how": "hide"}, "how='hide'"),
        ({"methods": [("raw", {"per_head": True})]}, "axes"),
    ],
)
def test_bad_options(subject, data, options, said):
    with pytest.raises(errors.InputError, match=said):
        regard.compare(subject, data, **options)


def test_data_may_be_anything_that_can_be_read(subject, tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("text,label\n" + "\n".join(f"{text},positive" for text in TEXTS))
    for given in (path, TEXTS, pd.DataFrame({"text": TEXTS})):
        assert regard.compare(subject, given, methods=["raw"], examples=3).settings["examples"] == 3
    with pytest.raises(errors.SubjectError, match="subject="):
        regard.compare("bert", TEXTS)


def test_a_rationale_goes_to_the_words_that_the_model_sees():
    example = Example("I don't like-it .", rationale=(False, True, True, False), id="x")
    words = ["I", "don", "'", "t", "like", "-", "it", "."]
    assert truth_on(example, words).tolist() == [False, True, True, True, True, True, True, False]
    assert truth_on(example, words[:3]).tolist() == [False, True, True], "a text that was cut"
    assert truth_on(Example("a b"), ["a", "b"]) is None
    joined = Example("no \u200ddaily \u2640\ufe0f news", rationale=(False, True, True, False))
    assert truth_on(joined, ["no", "daily", "\u2640", "news"]).tolist() == [False, True, True, False], (
        "joiners are dropped"
    )
    with pytest.raises(errors.InputError, match="example 'x'"):
        truth_on(example, ["you", "do"])


def test_words_have_the_sum_of_their_pieces(subject):
    why = regard.explain(subject, "so good", method="raw")
    assert on_words(why, why.features).tolist() == pytest.approx(why.scores.tolist())


def test_a_planted_task_from_data_to_league():
    found = regard.compare_planted("xor", methods=["rollout", "leave_one_out"], examples=60)
    assert found.confirmation.confirmed
    league = found.league.set_index("method")
    assert league.loc["leave_one_out", "auprc"] > 0.95
    assert league.loc["leave_one_out", "auprc_place"] == 1
    low, high = league.loc["random", ["auprc_low", "auprc_high"]]
    assert low - 0.05 <= found.chance <= high + 0.05
    assert found.confirmation.says in found.note


def test_a_model_that_has_not_solved_the_task_is_no_ground_truth():
    found = regard.compare_planted("two_facts", methods=["rollout"], examples=20, train=40, epochs=1)
    assert not found.confirmation.confirmed
    assert "may not serve" in found.note
    assert "auprc" not in found.league
