"""`regard fit`, and `audit` of what it saved: from a table to a report about its columns."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

import regard

pytest.importorskip("rtdl_revisiting_models", reason="pip install 'regard[tabular]'")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Who is old and in town pays much; some cells are missing."""
    draw = np.random.default_rng(0)
    frame = pd.DataFrame({
        "age": draw.integers(20, 80, 160), "place": draw.choice(["town", "sea", "hill"], 160), "noise": draw.normal(size=160)
    })  # fmt: skip
    old = (frame["age"] > 50) & (frame["place"] == "town")
    frame["pays"] = np.where(old, "much", "little")
    frame["rent"] = frame["age"] * 3.5 + draw.normal(size=160)
    frame["sort"] = draw.choice(["a", "b"], 160)
    frame.loc[:3, "age"] = np.nan
    frame.loc[4:6, "place"] = None
    path = tmp_path_factory.mktemp("table") / "people.csv"
    frame.to_csv(path, index=False)
    return path


def test_from_a_table_to_a_model_and_its_report(call, table, tmp_path):
    folder = tmp_path / "model"
    given = ["fit", "--data", table, "--target-column", "pays", "--columns", "age,place,noise", "--out", folder]
    code, out, err = call(*given, "--epochs", 2, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert (told["model"], told["columns"], told["trained on"], told["held out"]) == (
        "FTTransformerClassifier",
        3,
        128,
        32,
    )
    held = pd.read_csv(folder / "held_out.csv")
    assert [*held.columns] == ["age", "place", "noise", "pays"]
    assert told["accuracy"] == pytest.approx(
        (regard.estimators.load(folder).predict(held) == held["pays"]).mean(), abs=1e-4
    )
    assert f"--model {folder}" in err
    assert told[f"(always {held['pays'].mode()[0]})"] == pytest.approx((held["pays"] == "little").mean(), abs=1e-4)

    again = ["audit", "--model", folder, "--data", folder / "held_out.csv", "--target-column", "pays"]
    run = tmp_path / "run"
    asked = ["--methods", "raw,rollout", "--trials", "agreement,comprehensiveness", "--shown", 1, "--out", run]
    code, out, err = call(*again, *asked, "--redact")
    assert code == 0, err
    found = regard.load_audit(run)
    assert "ranks columns as gradient" in " ".join(out.split())
    assert found.exhibits[0]["words"] == ["age", "place", "noise"]
    assert set(found.exhibits[0]["cells"]) == {"▮"}
    assert "town" not in (run / "findings.json").read_text()
    page = (run / "report.html").read_text()
    assert "age = ▮" in page
    assert "Columns are shaded" in page

    code, _, err = call(*given)
    assert (code, f"--out {folder} holds a model" in err) == (2, True)


@pytest.mark.parametrize("model", ["ft_transformer", "tab_transformer", "saint"])
def test_every_trial_runs_or_says_why_not(call, table, tmp_path, model):
    folder, run = tmp_path / "model", tmp_path / "run"
    code, _, err = call("fit", "--data", table, "--target-column", "pays", "--columns", "age,place,sort,noise", "--out",
                        folder, "--model", model, "--epochs", 1)  # fmt: skip
    assert code == 0, err
    odd = pd.read_csv(table)[:12].assign(place="moon", noise=np.nan)
    odd.to_csv(tmp_path / "odd.csv", index=False)
    code, _, err = call("audit", "--model", folder, "--data", tmp_path / "odd.csv", "--target-column", "pays", "--trials",
                          "all", "--methods", "raw", "--shown", 1, "--out", run, "--workers", 1)  # fmt: skip
    assert code == 0, err
    found = regard.load_audit(run)
    ran = {one.trial for _, one in found.findings}
    assert {"agreement", "permutation", "uniform", "randomisation", "stability", "comprehensiveness"} <= ran
    refused = {one["trial"]: one["why"] for one in found.refused}
    assert ran | {*refused} == {*regard.list_trials()["name"]}
    assert "rationales" in refused["plausibility"]
    page = " ".join((run / "report.html").read_text().split())
    assert "column &#39;place&#39;: 12 of 12 cells were never seen in training" in page
    assert "column &#39;noise&#39; has no value in any row" in page
    assert ("the model attends to categories only" in page) == (model == "tab_transformer")


def test_a_quantity_is_a_regression(call, table, tmp_path):
    given = ["fit", "--data", table, "--columns", "age,place", "--epochs", 1]
    code, out, err = call(*given, "--target-column", "rent", "--out", tmp_path / "rent", "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["model"] == "FTTransformerRegressor"
    assert 0 < told["RMSE"] < 1000
    code, out, err = call(*given, "--target-column", "rent", "--out", tmp_path / "x", "--model", "saint")
    assert (code, "has no regression here" in err) == (2, True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--target-column", "pay"], ["target_column='pay'", "Did you mean 'pays'"]),
        (["--model", "ft_transformr"], ["model='ft_transformr'", "Did you mean 'ft_transformer'"]),
        (["--task", "guessing"], ["task='guessing'", "classification"]),
        (["--columns", "age,plce"], ["columns='plce'", "'age', 'place'"]),
        (["--data", "nowhere.csv"], ["nowhere.csv", "is not a file"]),
        (["--limit", "3"], ["has 3 rows: too few to learn from. Give 8 or more"]),
        (["--categories", "colour"], ["colour"]),
    ],
)
def test_what_is_refused(call, table, tmp_path, change, words):
    given = {"--data": table, "--target-column": "pays", "--out": tmp_path / "model"}
    given |= dict(zip(change[::2], change[1::2], strict=True))
    code, out, err = call("fit", *(part for pair in given.items() for part in pair))
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert not (tmp_path / "model" / "estimator.json").exists()


def test_a_table_without_the_columns_of_the_model_is_refused(call, table, tmp_path):
    folder = tmp_path / "model"
    call("fit", "--data", table, "--target-column", "pays", "--columns", "age,place", "--out", folder, "--epochs", 1)
    other = tmp_path / "other.csv"
    pd.read_csv(table).rename(columns={"place": "town"}).to_csv(other, index=False)
    code, _, err = call(
        "audit", "--model", folder, "--data", other, "--target-column", "pays", "--out", tmp_path / "run"
    )
    assert code == 2
    assert f"{other} has no column 'place', which {folder} was trained on" in err
    code, _, err = call(
        "audit", "--model", folder, "--data", table, "--target-column", "pay", "--out", tmp_path / "run"
    )
    assert (code, "target_column='pay'" in err, "Did you mean 'pays'" in err) == (2, True, True)
    code, _, err = call("trial", "agreement", "--model", folder, "--data", table, "--similar-to", "x")
    assert (code, "--similar-to x: this model gives no vector" in err) == (2, True)
    code, _, err = call("fit", "--data", table, "--target-column", "pays", "--out", other)
    assert (code, f"--out {other} is a file" in err) == (2, True)
    (folder / "estimator.json").write_text("{")
    code, _, err = call(
        "audit", "--model", folder, "--data", table, "--target-column", "pays", "--out", tmp_path / "run"
    )
    assert (code, "damaged" in err) == (2, True)


def test_a_model_for_tables_is_examined_by_usual_rows(call, table, tmp_path):
    folder = tmp_path / "model"
    call("fit", "--data", table, "--target-column", "pays", "--columns", "age,place", "--out", folder, "--epochs", 1)
    code, out, err = call("doctor", "--model", folder, "--json")
    assert code == 0, err
    told = json.loads(out)
    assert told["tried on"] == "two rows made of what is usual in its columns"
    code, _, err = call("trace", "--model", folder, "--text", "a moving film")
    assert (code, "reads rows of a table" in err) == (2, True)
