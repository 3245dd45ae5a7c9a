"""The estimators: scikit-learn's own checks, early stopping, what is saved, and bad input."""

from __future__ import annotations

import json
import logging

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.compose import make_column_transformer
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OrdinalEncoder, QuantileTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import regard
from regard import errors
from regard.estimators import (
    FTTransformerClassifier,
    FTTransformerRegressor,
    SAINTClassifier,
    TabTransformerClassifier,
    load,
)
from regard.fitting import descend, split

QUICK = {"learning_rate": 3e-2, "batch_size": 64, "epochs": 5}
FT = {"blocks": 1, "width": 16}
LAST_BITS = "a batch differs from singles in the last bits (float32): decision 30 of the design"
OTHER_ROWS = "SAINT attends to the other rows of a batch, so predictions depend on them"
FAILS = {
    "FTTransformerClassifier": {"check_methods_subset_invariance": LAST_BITS},
    "FTTransformerRegressor": {"check_methods_subset_invariance": LAST_BITS},
    "TabTransformerClassifier": {
        "check_methods_subset_invariance": LAST_BITS,
        "check_methods_sample_order_invariance": LAST_BITS,
        "check_classifier_data_not_an_array": "it needs a category, here x0, column 0 of an array; here that is named 0",
    },
    "SAINTClassifier": {
        "check_methods_subset_invariance": OTHER_ROWS,
        "check_methods_sample_order_invariance": OTHER_ROWS + ": their order changes the last bits",
    },
}
TO_CHECK = [
    FTTransformerClassifier(**FT, **QUICK),
    FTTransformerRegressor(**FT, **{**QUICK, "epochs": 12}),
    TabTransformerClassifier(categories=["x0"], width=8, depth=1, **QUICK),
    SAINTClassifier(width=4, heads=1, **{**QUICK, "learning_rate": 1e-2}),
]


@parametrize_with_checks(TO_CHECK, expected_failed_checks=lambda one: FAILS[type(one).__name__])
@pytest.mark.filterwarnings("ignore")  # scikit-learn warns about checks that it leaves out
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def table(rows=120, seed=0):
    """The class is "yes" where colour is red, or size large; weight is noise."""
    draw = np.random.default_rng(seed)
    frame = pd.DataFrame({
        "size": draw.normal(10, 3, rows), "colour": draw.choice(["red", "green", "blue"], rows),
        "weight": draw.normal(0, 1, rows), "old": draw.random(rows) < 0.5,
    })  # fmt: skip
    return frame, np.where((frame["colour"] == "red") | (frame["size"] > 13), "yes", "no")


EACH = [
    FTTransformerClassifier(**FT, **QUICK),
    TabTransformerClassifier(width=16, depth=1, heads=2, **QUICK),
    SAINTClassifier(width=8, heads=2, **{**QUICK, "learning_rate": 1e-2}),
    SAINTClassifier(attention="columns", depth=1, width=8, heads=2, **{**QUICK, "learning_rate": 1e-2}),
]


@pytest.mark.parametrize("estimator", EACH, ids=lambda one: f"{type(one).__name__}-{one.get_params().get('attention')}")
def test_each_learns_explains_and_is_saved(estimator, tmp_path):
    frame, y = table(400)
    before = torch.random.get_rng_state()
    fitted = clone(estimator).set_params(epochs=15).fit(frame, y)
    assert torch.equal(torch.random.get_rng_state(), before)
    test, truth = table(100, seed=1)
    assert fitted.score(test, truth) > 0.85
    assert fitted.classes_.tolist() == ["no", "yes"]
    assert fitted.feature_names_in_.tolist() == list(frame.columns)
    assert not fitted.model_.training
    probability = fitted.predict_proba(test)
    np.testing.assert_allclose(probability.sum(1), 1, atol=1e-12)
    assert (fitted.classes_[probability.argmax(1)] == fitted.predict(test)).all()

    again = load(fitted.save(tmp_path / "here"))
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["estimator.json", "model.safetensors"]
    assert np.array_equal(again.predict_proba(test), probability)
    assert again.get_params() == fitted.get_params()
    assert again.schema_ == fitted.schema_
    pd.testing.assert_frame_equal(again.history_, fitted.history_)

    subject = again.subject_
    (why,) = regard.explain(subject, test.head(1), method="average", target="yes")
    assert [word for word in why.words()["word"] if word != "[CLS]"] == list(frame.columns)
    some = test.head(60)  # one batch, for the rows that SAINT looks at
    output = subject.forward(subject.encode(some)).softmax(-1).double()
    torch.testing.assert_close(output, torch.tensor(again.predict_proba(some)), atol=1e-6, rtol=0)


def test_a_regression_is_undone():
    frame, _ = table(300)
    y = 2 * frame["size"] + 3 * (frame["colour"] == "red")
    options = {**FT, **QUICK, "epochs": 20, "learning_rate": 1e-2}
    plain = FTTransformerRegressor(**options).fit(frame, y)
    assert plain.score(frame, y) > 0.9
    assert plain.target_mean_ == pytest.approx(y.mean())
    other = FTTransformerRegressor(**options).fit(frame, 1000 * y + 5e4)
    np.testing.assert_allclose(other.predict(frame), 1000 * plain.predict(frame) + 5e4, rtol=1e-3)
    best = -float(plain.history_["validation"].max())  # an RMSE in the unit of y
    assert best == pytest.approx(-float(other.history_["validation"].max()) / 1000, rel=1e-2)
    assert 0 < best < y.std()
    (why,) = regard.explain(plain.subject_, frame.head(1), method="average")
    assert why.words()["word"].tolist() == ["[CLS]", *frame.columns]


def test_a_saved_regression_and_an_array(tmp_path):
    frame, _ = table(60)
    numbers = frame[["size", "weight"]].to_numpy()
    fitted = FTTransformerRegressor(**FT, **QUICK).fit(numbers, numbers[:, 0])
    assert not hasattr(fitted, "feature_names_in_")
    assert fitted.schema_.names == ("x0", "x1")
    again = load(fitted.save(tmp_path))
    assert np.array_equal(again.predict(numbers), fitted.predict(numbers))
    assert not hasattr(again, "feature_names_in_")
    with pytest.raises(ValueError, match="X has 1 features, but FTTransformerRegressor is expecting 2"):
        again.predict(numbers[:, :1])
    with pytest.warns(UserWarning, match="fitted without feature names"):  # by place, as scikit-learn has it
        assert np.array_equal(again.predict(pd.DataFrame(numbers, columns=["a", "b"])), fitted.predict(numbers))


@pytest.mark.parametrize("classes", [["a", "b"], [3, 7], [False, True], [0.0, 1.0]], ids=str)
def test_classes_keep_their_type(classes, tmp_path):
    frame, y = table(40)
    given = np.array(classes)[(y == "yes").astype(int)]
    weight = {name: 1.0 + place for place, name in enumerate(np.unique(given))}
    fitted = FTTransformerClassifier(**FT, **{**QUICK, "epochs": 1}, class_weight=weight).fit(frame, given)
    again = load(fitted.save(tmp_path))
    assert again.classes_.dtype == fitted.classes_.dtype == given.dtype
    assert again.class_weight == weight
    assert set(again.predict(frame)) <= set(classes)


def test_pipelines_and_cross_validation():
    frame, y = table(150)
    numbers = make_column_transformer(
        (QuantileTransformer(n_quantiles=20, output_distribution="normal"), ["size", "weight"]),
        remainder="passthrough", verbose_feature_names_out=False,
    )  # fmt: skip
    model = FTTransformerClassifier(**FT, **{**QUICK, "epochs": 10})
    whole = make_pipeline(numbers.set_output(transform="pandas"), model)
    assert cross_val_score(whole, frame, y, cv=2, error_score="raise").mean() > 0.7
    assert set(clone(whole).fit(frame, y)[-1].schema_.names) == set(frame.columns)
    arrays = make_column_transformer((OrdinalEncoder(), ["colour"]), remainder="drop")
    named = make_pipeline(arrays, clone(model).set_params(categories=["x0"])).fit(frame, y)
    assert named[-1].schema_.categories == ("x0",)
    assert clone(model).set_params(patience=3).get_params()["patience"] == 3


def test_the_paper_s_defaults(monkeypatch):
    made = []

    class Spy(torch.optim.AdamW):
        def __init__(self, groups, **options):
            super().__init__(groups, **options)
            made.append(self)

    monkeypatch.setattr(torch.optim, "AdamW", Spy)
    frame, y = table(12)
    fitted = FTTransformerClassifier(epochs=1).fit(frame, y)
    assert (fitted.batch_size, fitted.patience) == (256, 16)
    blocks = fitted.model_.backbone.blocks
    assert len(blocks) == 3
    assert blocks[0]["attention"].W_q.weight.shape == (192, 192)
    assert blocks[0]["attention"]._n_heads == 8
    assert blocks[0]["attention"].dropout.p == 0.2
    decayed, free = made[0].param_groups
    assert (decayed["lr"], decayed["weight_decay"], free["weight_decay"]) == (1e-4, 1e-5, 0)
    names = {id(parameter): name for name, parameter in fitted.model_.named_parameters()}
    kept = {names[id(one)] for one in free["params"]}
    assert {"cont_embeddings.weight", "cat_embeddings.bias", "cls_embedding.weight"} <= kept
    assert all(name.endswith("weight") and "normalization" not in name.split(".")[-2] for name in
               (names[id(one)] for one in decayed["params"]) if name != "backbone.output.normalization.weight")  # fmt: skip


class Dial(nn.Module):
    """Its one weight is what it predicts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))


def test_early_stopping_keeps_the_best():
    model, qualities = Dial(), iter([1.0, 3.0, 3.0, 2.0, 2.0, 9.0])
    found = descend(
        model, lambda m, numbers, codes: m.weight.expand(len(numbers), 1), [torch.zeros(10, 1), torch.zeros(10, 0)],
        torch.ones(10), parts=(torch.arange(8), torch.arange(8, 10)),
        loss=lambda output, target: (output[:, 0] - target).abs().mean(),  # AdamW goes 0.1 up in each epoch
        quality=lambda output, target: torch.tensor(next(qualities)),
        groups=model.parameters(), epochs=50, patience=3, batch_size=8, learning_rate=0.1, weight_decay=0.0,
    )  # fmt: skip
    assert found["validation"].tolist() == [1, 3, 3, 2, 2]  # three epochs that were no better than the second
    assert model.weight.item() == pytest.approx(0.3, abs=1e-3)  # of the two best the later
    assert not model.training


def test_without_a_held_out_part_all_epochs_run():
    frame, y = table(30)
    fitted = FTTransformerClassifier(**FT, **QUICK, validation=None).fit(frame, y)
    assert fitted.history_.columns.tolist() == ["epoch", "loss"]
    assert len(fitted.history_) == 5


def test_each_class_is_held_out_by_its_share():
    target = torch.tensor([0] * 60 + [1] * 30 + [2] * 10 + [3])
    for _ in range(20):
        rest, held = split(target, 0.2)
        assert sorted([*rest.tolist(), *held.tolist()]) == list(range(101))
        counts = target[held].bincount(minlength=4).tolist()
        assert counts[0] in (11, 12, 13)
        assert counts[1] in (5, 6, 7)
        assert counts[2] in (1, 2, 3)
        assert counts[3] == 0  # the only one of its class is learned from
    rest, held = split(torch.randn(50), 0.2)
    assert (len(rest), len(held)) == (40, 10)


def test_very_many_rows_are_split():
    for seed in range(3, 6):
        torch.manual_seed(seed)
        rest, held = split(torch.zeros(1_000_000), 0.2)
        assert (len(rest), len(held)) == (800_000, 200_000)


def test_a_device_that_is_not_there(tmp_path, caplog):
    frame, y = table(40)
    folder = FTTransformerClassifier(**FT, **{**QUICK, "epochs": 1}).fit(frame, y).save(tmp_path / "model")
    plain = json.loads((folder / "estimator.json").read_text("utf-8"))
    plain["parameters"]["device"] = "cuda:7"
    (folder / "estimator.json").write_text(json.dumps(plain), "utf-8")
    with caplog.at_level(logging.WARNING, "regard"):
        assert load(folder).predict(frame).shape == (40,)
    assert "was trained on cuda:7, which is not there: it runs on the CPU" in caplog.text
    with pytest.raises(errors.OptionError, match="device='cuda:8' is not there"):
        load(folder, device="cuda:8")


def test_seeds():
    frame, y = table(60)

    def predicted(**options):
        return FTTransformerClassifier(**FT, **{**QUICK, "epochs": 2}, **options).fit(frame, y).predict_proba(frame)

    assert np.array_equal(predicted(), predicted())
    assert not np.array_equal(predicted(), predicted(random_state=1))
    assert not np.array_equal(predicted(random_state=None), predicted(random_state=None))


def test_class_weights():
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({"x": draw.normal(0, 1, 400)})
    y = np.where(frame["x"] + draw.normal(0, 1, 400) > 1.8, "rare", "common")
    recall = {}
    for weight in (None, "balanced", {"rare": 50.0}):
        fitted = FTTransformerClassifier(**FT, **{**QUICK, "epochs": 12}, class_weight=weight).fit(frame, y)
        recall[str(weight)] = (fitted.predict(frame)[y == "rare"] == "rare").mean()
    assert recall["None"] < recall["balanced"] <= recall[str({"rare": 50.0})]
    assert recall["balanced"] > 0.7


def test_missing_and_unseen_cells():
    frame, y = table(200)
    fitted = FTTransformerClassifier(**FT, **QUICK).fit(frame, y)
    row = frame.head(1)
    mean = row.assign(size=frame["size"].mean())
    np.testing.assert_allclose(
        fitted.predict_proba(row.assign(size=np.nan)), fitted.predict_proba(mean), rtol=1e-5
    )  # a missing number is the mean
    unseen, missing = (fitted.predict_proba(row.assign(colour=colour)) for colour in ("mauve", None))
    assert np.array_equal(unseen, missing)
    every = clone(fitted).set_params(validation=None).fit(frame, y)  # none was missing: the mean of the rows learned
    embedding = every.model_.cat_embeddings.embeddings[0].weight.detach()
    counts = torch.tensor([(frame["colour"] == colour).sum() for colour in ("blue", "green", "red")]).float()
    torch.testing.assert_close(embedding[0], counts @ embedding[1:] / counts.sum())
    odd = frame.assign(colour=["mauve", *frame["colour"][1:]])
    learned = clone(fitted).set_params(validation=None, epochs=1).fit(odd, y)
    learned._tell_unseen(learned.model_, torch.tensor([[1, 1], [1, 1], [2, 2]]))  # codes 3 and 4 were in no such row
    embedding = learned.model_.cat_embeddings.embeddings[0].weight.detach()
    torch.testing.assert_close(embedding[3:], (embedding[1] * 2 / 3 + embedding[2] / 3).expand(2, -1))
    strict = clone(fitted).set_params(unseen="error").fit(frame, y)
    with pytest.raises(errors.InputError, match="'colour' holds 'mauve', which it did not at training"):
        strict.predict(row.assign(colour="mauve"))
    with pytest.raises(errors.InputError, match="'colour' holds 'mauve'"):
        regard.explain(strict.subject_, row.assign(colour="mauve"), method="raw")

    holes = frame.copy()
    holes.loc[::5, "colour"] = None
    holes.loc[::7, "size"] = np.nan
    learned = FTTransformerClassifier(**FT, **QUICK).fit(holes, y)
    embedding = learned.model_.cat_embeddings.embeddings[0].weight.detach()
    assert (embedding[0] - embedding[1:].mean(0)).abs().max() > 0.05  # what is missing was learned
    for other in (TabTransformerClassifier(width=8, depth=1, **QUICK), SAINTClassifier(width=8, heads=2, **QUICK)):
        assert np.isfinite(other.fit(holes, y).predict_proba(holes)).all()


def test_columns_are_found_by_name():
    frame, y = table(60)
    fitted = FTTransformerClassifier(**FT, **QUICK).fit(frame, y)
    wanted = fitted.predict_proba(frame)
    assert np.array_equal(fitted.predict_proba(frame[frame.columns[::-1]].assign(more=1)), wanted)
    with pytest.raises(errors.InputError, match="'colour'"):
        fitted.predict(frame.drop(columns="colour"))
    with pytest.raises(errors.InputError, match="'weight'. Did you mean 'weigth'"):
        fitted.predict(frame.rename(columns={"weight": "weigth"}))
    with pytest.raises(errors.InputError, match="'size' should hold numbers, and has the text 'big' in row 0"):
        fitted.predict(frame.assign(size="big"))
    with pytest.raises(errors.InputError, match="'colour' holds numbers such as 1"):
        fitted.predict(frame.assign(colour=1.0))

    class Polars:
        columns = tuple(frame.columns)

        def to_pandas(self):
            return frame

    assert np.array_equal(fitted.predict_proba(Polars()), wanted)


def bad(what):
    frame, y = table(40)
    return {
        "3 rows": (frame.head(3), y[:3]),
        "one class": (frame, ["a"] * 40),
        "length": (frame, y[:-1]),
        "missing y": (frame, [None, *y[1:]]),
        "continuous y": (frame, frame["size"]),
        "no value": (frame.assign(size=np.nan), y),
        "infinite": (frame.assign(size=np.inf), y),
        "no rows": (frame.head(0), []),
        "no columns": (frame[[]], y),
        "same name": (frame.set_axis(["a", "a", "b", "c"], axis=1), y),
        "no y": (frame, None),
        "mixed y": (frame, np.array([y[0], 1, *y[2:]], dtype=object)),
        "times": (frame.assign(size=pd.Timestamp("2020-01-01")), y),
    }[what]


@pytest.mark.parametrize(("what", "said"), [
    ("3 rows", "X has 3 samples: too few to learn from. Give 5 or more"),
    ("one class", "y holds one class only, 'a'"),
    ("length", "y has 39 values, but X has 40 rows"),
    ("missing y", "y: 1 values are missing, the first in row 0. Drop these rows"),
    ("continuous y", "Unknown label type: continuous"),
    ("no value", "'size' has no value in any row"),
    ("infinite", "'size' holds inf in row 0"),
    ("no rows", "X has 0 rows and 4 columns"),
    ("no columns", "X has 40 rows and 0 columns"),
    ("same name", "X has columns of the same name: 'a'"),
    ("no y", "requires y to be passed"),
    ("mixed y", "y holds values of kinds that have no order"),
    ("times", "'size' holds times"),
])  # fmt: skip
def test_bad_input(what, said):
    X, y = bad(what)
    with pytest.raises(ValueError, match=said):
        FTTransformerClassifier(**FT, **QUICK).fit(X, y)


def test_bad_targets_of_a_regression(caplog):
    frame, y = table(40)
    with pytest.raises(errors.InputError, match="y must hold numbers; it holds '.*'. For classes use a classifier"):
        FTTransformerRegressor(**FT, **QUICK).fit(frame, y)
    with pytest.raises(errors.InputError, match="y holds infinity in row 3"):
        FTTransformerRegressor(**FT, **QUICK).fit(frame, [0, 1, 2, np.inf, *range(36)])
    with caplog.at_level(logging.WARNING, "regard"):
        fitted = FTTransformerRegressor(**FT, **QUICK).fit(frame.assign(size=1.0), [7] * 40)
    assert "y is constant (7)" in caplog.text
    assert "column 'size' is constant (1)" in caplog.text
    np.testing.assert_allclose(fitted.predict(frame), 7, atol=1)


@pytest.mark.parametrize(("options", "said"), [
    ({"epochs": 0}, "epochs=0 must be 1 or more"),
    ({"patience": -1}, "patience=-1 must be 1 or more"),
    ({"batch_size": 2.5}, "batch_size=2.5 must be 1 or more"),
    ({"learning_rate": 0}, "learning_rate=0 must be a number above 0"),
    ({"weight_decay": -1}, "weight_decay=-1 must be a number 0 or more"),
    ({"validation": 0.9}, "validation=0.9 must be a number above 0, and at most 0.5"),
    ({"unseen": "skip"}, "unseen='skip' is not known"),
    ({"categories": ["color"]}, "categories: 'color' is no column. Did you mean 'colour'"),
    ({"random_state": "x"}, "random_state='x' must be a whole number"),
    ({"blocks": 7}, "blocks=7 must be 1 or more, and at most 6"),
    ({"width": 20}, "width=20 must be a multiple of 8"),
    ({"class_weight": "even"}, "class_weight"),
    ({"class_weight": {"no": 0.0, "yes": 1.0}}, "must be above 0. Leave out rows that do not count"),
    ({"learning_rate": 1e30}, "the loss became nan in epoch .*. Lower learning_rate=1e\\+30"),
])  # fmt: skip
def test_bad_options(options, said):
    frame, y = table(40)
    with pytest.raises((ValueError, errors.NonFinite), match=said):
        FTTransformerClassifier(**{**FT, **QUICK, **options}).fit(frame, y)


def test_five_thousand_columns(caplog):
    frame = pd.DataFrame(np.random.default_rng(0).normal(size=(10, 5000))).rename(columns=str)
    y = np.arange(10) % 2
    with (
        caplog.at_level(logging.WARNING, "regard"),
        pytest.raises(errors.TooLarge, match="attention over 5000 columns"),
    ):
        FTTransformerClassifier(batch_size=4096).fit(frame, y)
    assert "5000 columns: each layer and head weighs all pairs" in caplog.text


def test_nothing_was_fitted():
    frame, _ = table(10)
    for call in (lambda one: one.predict(frame), lambda one: one.subject_, lambda one: one.save("nowhere")):
        with pytest.raises(NotFittedError):
            call(FTTransformerClassifier())
    again = FTTransformerClassifier(**FT, **{**QUICK, "epochs": 1}).fit(frame, ["a", "b"] * 5)
    with pytest.raises(ValueError, match="one class only"):
        again.fit(frame.drop(columns="size"), ["a"] * 10)
    with pytest.raises(NotFittedError):  # rather than an old model with the columns of a new table
        again.predict(frame)


def test_folders_that_hold_no_estimator(tmp_path):
    with pytest.raises(errors.NotAModel, match="holds no estimator that can be loaded"):
        load(tmp_path)
    frame, y = table(20)
    fitted = FTTransformerClassifier(**FT, **{**QUICK, "epochs": 1}).fit(frame, y)
    fitted.save(tmp_path)
    written = (tmp_path / "estimator.json").read_text()
    record = json.loads(written)
    assert record["kind"] == "FTTransformerClassifier"
    assert record["classes"] == ["no", "yes"]
    for change in ({"kind": "Forest"}, {"format": "regard.estimator/9"}, {"schema": {}}, {"classes": ["a"]}):
        (tmp_path / "estimator.json").write_text(json.dumps({**record, **change}))
        with pytest.raises(errors.NotAModel, match="holds"):
            load(tmp_path)
    (tmp_path / "estimator.json").write_text(written[:100])
    with pytest.raises(errors.NotAModel):
        load(tmp_path)
    (tmp_path / "estimator.json").write_text(written)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(errors.NotAModel):
        load(tmp_path)
