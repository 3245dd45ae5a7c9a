"""What columns are held against: each reference against a literal loop, groups, and what is refused."""

from __future__ import annotations

import logging

import numpy as np
import pandas as pd
import pytest
from sklearn.inspection import permutation_importance as of_scikit_learn
from sklearn.linear_model import LinearRegression, LogisticRegression

from regard import errors
from regard.estimators import FTTransformerClassifier, TabTransformerClassifier
from regard.references import leave_one_column_out, permutation_importance, remove_and_retrain

LOTS = np.random.default_rng(0)
FRAME = pd.DataFrame(LOTS.normal(size=(200, 4)), columns=[*"abcd"])
TARGET = 3 * FRAME["a"] + FRAME["b"] - 0.5 * FRAME["c"] + LOTS.normal(0, 0.1, 200)
MODEL = LinearRegression().fit(FRAME, TARGET)


def test_single_columns_are_permuted_as_by_scikit_learn():
    found = permutation_importance(MODEL, FRAME, TARGET, repeats=4, seed=3)
    expected = of_scikit_learn(MODEL, FRAME, TARGET, n_repeats=4, random_state=3)
    np.testing.assert_allclose(found.repeats, expected.importances, atol=1e-12)
    assert found.score == pytest.approx(MODEL.score(FRAME, TARGET))
    assert found.frame["column"].tolist() == [*"abcd"]
    assert found.frame["rank"].tolist() == [1, 2, 3, 4]
    assert (found.frame["low"] <= found.frame["value"]).all()


def test_the_columns_of_a_group_are_permuted_together():
    frame = FRAME.assign(again=FRAME["a"])  # a copy: shuffled alone, the other keeps what it says
    model = LinearRegression().fit(frame, TARGET)
    alone = permutation_importance(model, frame, TARGET, repeats=3).frame.set_index("column")["value"]
    found = permutation_importance(model, frame, TARGET, repeats=3, groups={"both": ["a", "again"]})
    assert found.groups == {"both": ("a", "again"), "b": ("b",), "c": ("c",), "d": ("d",)}
    together = found.frame.set_index("column")["value"]
    assert together["both"] > 1.5 * (alone["a"] + alone["again"])

    seen = []

    class Watching:
        def fit(self):
            raise AssertionError

        def score(self, frame, _):
            seen.append((frame["a"] == frame["again"]).all() and frame["b"].equals(FRAME["b"]))
            return 0.0

    permutation_importance(Watching(), frame, TARGET, repeats=2, groups={"both": ["a", "again"], "rest": [*"bcd"]})
    assert sum(seen) >= 3  # plain, and the two shuffles of "both"; of "rest" b moves


@pytest.mark.parametrize("by", ["mean", "missing"])
def test_a_column_left_out_is_the_same_everywhere(by):
    frame = pd.DataFrame({"size": LOTS.normal(size=120), "kind": LOTS.choice([1, 2, 7], 120, p=[0.5, 0.3, 0.2]),
                          "colour": LOTS.choice([*"rgb"], 120)})  # fmt: skip
    target = np.where((frame["size"] > 0) ^ (frame["kind"] == 2), "yes", "no")
    model = FTTransformerClassifier(blocks=1, width=16, epochs=3, categories=["kind", "colour"]).fit(frame, target)
    found = leave_one_column_out(model, frame, target, by=by)
    instead = {"size": frame["size"].mean(), "kind": frame["kind"].mode()[0], "colour": frame["colour"].mode()[0]}
    for place, name in enumerate(frame):
        cell = instead[name] if by == "mean" else None
        expected = model.score(frame, target) - model.score(frame.assign(**{name: cell}), target)
        assert found.repeats[place, 0] == pytest.approx(expected, abs=1e-12)


def test_names_of_columns_may_be_numbers_and_a_column_empty():
    class Anything:
        def fit(self):
            raise AssertionError

        def score(self, frame, _):
            return float(frame[0].mean())

    frame = pd.DataFrame({0: [1.0, 2.0, 6.0], 1: [None, None, None]})
    found = leave_one_column_out(Anything(), frame, [0, 1, 0], by="mean")
    assert found.repeats[:, 0].tolist() == [0, 0]


@pytest.mark.parametrize("first", [True, False])
def test_columns_are_removed_one_by_one_and_all_is_trained_anew(first, caplog):
    trained = []

    class Listing(LinearRegression):
        def fit(self, X, y):
            trained.append([*X.columns])
            return super().fit(X, y)

    with caplog.at_level(logging.WARNING, "regard"):
        table = remove_and_retrain(Listing, FRAME, TARGET, [*"abcd"], most_relevant_first=first, repeats=2)
    gone = [*"abc"] if first else [*"dcb"]
    assert trained == [[one for one in "abcd" if one not in gone[:count]] for count in range(4)] * 2
    assert table["column"].tolist() == ["", *gone]
    assert table["n"].tolist() == [2] * 4
    if first:
        assert table["score"][:3].is_monotonic_decreasing
        assert table["score"][1] < 0.5 < 0.9 < table["score"][0]
    else:
        assert table["score"][1] > 0.9  # d says nothing
    assert "8 trainings" in caplog.text
    assert "7 more trainings, about" in caplog.text


def test_it_ends_where_a_model_has_no_columns_left(caplog):
    frame = FRAME[["a", "b"]].assign(kind=LOTS.choice([*"xy"], 200), more=LOTS.choice([*"xy"], 200))
    with caplog.at_level(logging.WARNING, "regard"):
        table = remove_and_retrain(
            lambda: TabTransformerClassifier(width=8, depth=1, epochs=1), frame, frame["kind"] == "x",
            ["kind", "more", "a", "b"], repeats=2,
        )  # fmt: skip
    assert table["column"].tolist() == ["", "kind"]
    assert table["score"].notna().all()
    assert "ends with 1 columns removed: " in caplog.text


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: permutation_importance(MODEL, FRAME, TARGET[:3]), errors.InputError, "target has 3 entries for 200"),
        (lambda: permutation_importance(MODEL, FRAME.to_numpy(), TARGET), errors.InputError, "frame is a ndarray"),
        (lambda: permutation_importance(MODEL, FRAME[:0], []), errors.EmptyInput, "frame holds no rows"),
        (lambda: permutation_importance(MODEL, FRAME, TARGET, repeats=0), errors.OptionError, "repeats=0"),
        (lambda: permutation_importance(MODEL, FRAME, TARGET, groups={"g": ["aa"]}), errors.OptionError,
         "'aa' is no column"),
        (lambda: permutation_importance(MODEL, FRAME, TARGET, groups={"a": ["b", "c"]}), errors.OptionError,
         "'a' is a column that is not in the group of that name"),
        (lambda: permutation_importance(MODEL, FRAME, TARGET, groups={"g": ["a"], "h": ["a"]}), errors.OptionError,
         "'a' is in 'g' and in 'h'"),
        (lambda: leave_one_column_out(MODEL, FRAME, TARGET, by="zero"), errors.OptionError, "by='zero'"),
        (lambda: remove_and_retrain(LinearRegression, FRAME, TARGET, [*"abc"]), errors.InputError,
         "must name each column of the frame once"),
        (lambda: remove_and_retrain(LinearRegression, FRAME, TARGET, [*"abcd"], steps=4), errors.OptionError, "steps=4"),
        (lambda: remove_and_retrain(LinearRegression, FRAME, TARGET, [*"abcd"], share=1), errors.OptionError, "share=1"),
        (lambda: remove_and_retrain(LinearRegression, FRAME, TARGET, [*"abcd"], most_minutes=0), errors.OptionError,
         "most_minutes=0: 3 more trainings"),
    ],
)  # fmt: skip
def test_what_is_refused(call, kind, said):
    with pytest.raises(kind) as problem:
        call()
    assert said in str(problem.value)


def test_a_scoring_of_scikit_learn():
    model = LogisticRegression().fit(FRAME, TARGET > 0)
    found = permutation_importance(model, FRAME, TARGET > 0, scoring="roc_auc", repeats=2)
    assert found.settings["scoring"] == "roc_auc"
    assert found.frame["column"][0] == "a"
