"""What is learned of a table's columns, how its cells become numbers, and each thing that can be wrong with them."""

from __future__ import annotations

import json
import logging

import numpy as np
import pandas as pd
import pytest

from regard import errors
from regard.data.schema import Column, Schema

FRAME = pd.DataFrame(
    {"age": [20.0, 30.0, 70.0, None], "job": ["clerk", None, "nurse", "clerk"], "hours": [40, 20, 60, 40],
     "full": [True, False, True, True]}
)  # fmt: skip


class Polars:
    """As much of another library's frame as is asked for."""

    def __init__(self, frame):
        self.frame = frame

    def to_pandas(self):
        return self.frame


def test_columns_are_told_by_what_they_hold():
    schema = Schema.of(FRAME)
    assert schema.names == ("age", "job", "hours", "full")
    assert schema.numbers == ("age", "hours")
    assert schema.categories == ("job", "full")
    assert schema.cardinalities == (3, 3)
    assert schema.columns[1] == Column("job", "category", categories=("clerk", "nurse"))
    assert schema.columns[0].center == 40
    assert schema.columns[0].scale == pytest.approx(np.std([20, 30, 70]))


def test_cells_become_what_a_literal_loop_makes_of_them():
    schema = Schema.of(FRAME)
    found = schema.encode(FRAME)
    means = {"age": (40, np.std([20, 30, 70])), "hours": (40, np.std([40, 20, 60, 40]))}
    known = {"job": ["clerk", "nurse"], "full": ["False", "True"]}
    for row, cells in enumerate(FRAME.to_dict("records")):
        for place, (name, (mean, deviation)) in enumerate(means.items()):
            expected = 0.0 if pd.isna(cells[name]) else (cells[name] - mean) / deviation
            assert found.numbers[row, place] == pytest.approx(expected, abs=1e-6)
        for place, (name, categories) in enumerate(known.items()):
            expected = (
                0 if cells[name] is None or cells[name] != cells[name] else 1 + categories.index(str(cells[name]))
            )
            assert found.codes[row, place] == expected
    assert found.numbers.dtype == np.float32
    assert found.codes.dtype == np.int64
    assert len(found) == 4


def test_order_and_additional_columns_do_not_matter():
    schema = Schema.of(FRAME)
    other = FRAME.assign(more="x")[["full", "more", "hours", "job", "age"]]
    for one in (other, Polars(other)):
        again = schema.encode(one)
        assert np.array_equal(again.numbers, schema.encode(FRAME).numbers)
        assert np.array_equal(again.codes, schema.encode(FRAME).codes)


def test_json_and_back():
    schema = Schema.of(FRAME)
    assert Schema.from_dict(json.loads(json.dumps(schema.to_dict()))) == schema
    with pytest.raises(errors.InputError, match=r"not what Schema\.to_dict gives"):
        Schema.from_dict({"columns": [{"name": "age"}]})


def test_categories_can_be_named_and_a_gap_does_not_rename_whole_numbers():
    schema = Schema.of(pd.DataFrame({"zip": [1, 2, 2]}), categories=["zip"])
    assert schema.encode(pd.DataFrame({"zip": [2.0, None, 3.0, 1.0]})).codes[:, 0].tolist() == [2, 0, 0, 1]
    with pytest.raises(errors.OptionError, match=r"'zap' is no column\. Did you mean 'zip'\?"):
        Schema.of(pd.DataFrame({"zip": [1, 2]}), categories=["zap"])


@pytest.mark.parametrize("cells", [pd.Categorical(["a", "b"]), pd.array(["a", "b"], dtype="string"), ["a", "b"]])
def test_all_kinds_of_texts_are_one(cells):
    assert Schema.of(pd.DataFrame({"x": cells})).columns[0].categories == ("a", "b")


@pytest.mark.parametrize("cells", [pd.array([1, None, 3], dtype="Int64"), [1.0, np.nan, 3.0], [1, None, 3]])
def test_all_kinds_of_numbers_are_one(cells):
    frame = pd.DataFrame({"x": cells})
    assert Schema.of(frame).columns[0].center == 2
    assert Schema.of(frame).encode(frame).numbers[:, 0].tolist() == [-1, 0, 1]
    one_by_one = pd.DataFrame({"x": pd.Series([1, None, 3], dtype=object)})
    assert Schema.of(one_by_one).columns == Schema.of(frame).columns


# --- what is refused ------------------------------------------------------------------------------------------------


def row(**cells):
    return pd.DataFrame([{"age": 30, "job": "clerk", "hours": 40, "full": True, **cells}])


@pytest.mark.parametrize(
    ("frame", "kind", "said"),
    [
        (row().drop(columns="job"), errors.InputError, "'job'"),
        (row().rename(columns={"hours": "hour"}), errors.InputError, "'hours'. Did you mean 'hour'?"),
        (row(age="thirty"), errors.InputError, "column 'age' should hold numbers, and has the text 'thirty' in row 0"),
        (row(age="30"), errors.InputError, "At training it held numbers"),
        (row(job=3), errors.InputError, "column 'job' holds numbers such as 3; at training it held 'clerk', 'nurse'"),
        (row(age=np.inf), errors.InputError, "column 'age' holds inf in row 0"),
        (row(age=1e300), errors.InputError, "column 'age' holds 1e+300 in row 0: too large a number"),
        (row(job=[["clerk"]]), errors.InputError, "column 'job' holds more than single values"),
        (row(age=pd.Timestamp("2020-01-01")), errors.InputError, "column 'age' holds times"),
        (row()[:0], errors.EmptyInput, "0 rows"),
        ([row()], errors.InputError, "not a DataFrame"),
        (pd.concat([row(), row()[["age"]]], axis=1), errors.InputError, "of the same name: 'age'"),
    ],
)  # fmt: skip
def test_each_bad_frame_has_its_message(frame, kind, said):
    with pytest.raises(kind) as problem:
        Schema.of(FRAME).encode(frame)
    assert said in str(problem.value)


def test_a_category_never_seen_is_missing_unless_it_is_an_error():
    schema = Schema.of(FRAME)
    assert schema.encode(row(job="judge")).codes.tolist() == [[0, 2]]
    with pytest.raises(errors.InputError, match=r"'judge', which it did not at training \(known: 'clerk', 'nurse'\)"):
        schema.encode(row(job="judge"), unseen="error")
    with pytest.raises(errors.OptionError, match="unseen='drop'"):
        schema.encode(row(), unseen="drop")


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        ([None, None], "has no value in any row"),
        ([np.nan, np.nan], "has no value in any row"),
        ([1, "x"], "has the text 'x' in row 1"),
        ([*map(str, range(30)), "?"], "has the text '?' in row 30"),
        ([pd.Timestamp("2020-01-01")] * 2, "holds times"),
        ([[1], [2]], "holds more than single values"),
    ],
)
def test_each_bad_training_column_has_its_message(cells, said):
    with pytest.raises(errors.InputError) as problem:
        Schema.of(pd.DataFrame({"age": cells}))
    assert said in str(problem.value)
    assert "'age'" in str(problem.value)


def test_texts_that_are_numbers_are_categories_and_a_stray_text_can_be_declared_one():
    assert Schema.of(pd.DataFrame({"zip": [*map(str, range(30))]})).categories == ("zip",)
    stray = pd.DataFrame({"code": [*map(str, range(30)), "?"]})
    assert Schema.of(stray, categories=["code"]).cardinalities == (32,)
    with pytest.raises(errors.InputError, match="name it in categories="):
        Schema.of(pd.DataFrame({"job": ["a", "b"]}), categories=[])


@pytest.mark.parametrize("cells", [[7.5, 7.5], ["a", "a"]])
def test_a_constant_column_is_said(caplog, cells):
    with caplog.at_level(logging.WARNING, "regard"):
        schema = Schema.of(pd.DataFrame({"same": cells}))
    assert f"column 'same' is constant ({cells[0]})" in caplog.text
    assert schema.columns[0].scale == 1


def test_five_thousand_columns_are_said_with_their_cost(caplog):
    with caplog.at_level(logging.WARNING, "regard"):
        schema = Schema.of(pd.DataFrame(np.eye(2, 5000)[:, ::-1] + np.arange(2)[:, None]))
    assert "5000 columns" in caplog.text
    assert "25.0 million weights (95 MB) a row" in caplog.text
    assert schema.names[:2] == ("0", "1")


def test_small_numbers_are_not_constant(caplog):
    frame = pd.DataFrame({"x": np.arange(1.0, 6.0) * 1e-14})
    with caplog.at_level("WARNING", "regard"):
        assert np.ptp(Schema.of(frame).encode(frame).numbers) > 2
    assert not caplog.text


def test_three_rows_will_do():
    assert len(Schema.of(FRAME[:3]).encode(FRAME[:3])) == 3
