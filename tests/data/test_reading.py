"""Whatever the source, the same examples; whatever is wrong with it, said at once; however long, in little memory."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import tracemalloc
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from regard.data import BadRow, Dataset, Example, read
from regard.errors import EmptyInput, InputError, OptionError

SHARED = Path("/work/shared/data")
ROWS = [
    {"text": "a dull film", "label": "bad", "rationale": [0, 1, 0], "split": "train", "id": "one"},
    {"text": 'so "moving",\nreally', "label": "good", "rationale": [[1, 3]], "split": "train", "id": "two"},
    {"text": "größer als je 🎬", "label": "good", "rationale": [], "split": "test", "id": "three"},
]
EXAMPLES = [
    Example("a dull film", "bad", (False, True, False), "train", "one"),
    Example('so "moving",\nreally', "good", (False, True, True), "train", "two"),
    Example("größer als je 🎬", "good", (False, False, False, False), "test", "three"),
]


def write_csv(path, rows, delimiter=",", opener=open):
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        for row in rows:
            writer.writerow({name: json.dumps(cell) if isinstance(cell, list) else cell for name, cell in row.items()})
    return path


def write_jsonl(path, rows, opener=open):
    with opener(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


def write_parquet(path, rows):
    # Parquet has one type for a column, so rationales are JSON there.
    pd.DataFrame([row | {"rationale": json.dumps(row["rationale"])} for row in rows]).to_parquet(path)
    return path


def as_file(path, content, **options):
    path.write_bytes(content if isinstance(content, bytes) else content.encode(**options))
    return path


def dataset_of_datasets(rows):
    return datasets.Dataset.from_list([row | {"rationale": json.dumps(row["rationale"])} for row in rows])


SOURCES = {
    "csv": lambda folder: write_csv(folder / "rows.csv", ROWS),
    "CSV.gz": lambda folder: write_csv(folder / "rows.CSV.gz", ROWS, opener=gzip.open),
    "tsv": lambda folder: write_csv(folder / "rows.tsv", ROWS, "\t"),
    "tsv.gz": lambda folder: write_csv(folder / "rows.tsv.gz", ROWS, "\t", gzip.open),
    "jsonl": lambda folder: str(write_jsonl(folder / "rows.jsonl", ROWS)),
    "jsonl.gz": lambda folder: write_jsonl(folder / "rows.jsonl.gz", ROWS, gzip.open),
    "parquet": lambda folder: write_parquet(folder / "rows.parquet", ROWS),
    "DataFrame": lambda folder: pd.DataFrame(ROWS),
    "datasets.Dataset": lambda folder: dataset_of_datasets(ROWS),
    "datasets.IterableDataset": lambda folder: dataset_of_datasets(ROWS).to_iterable_dataset(),
    "list": lambda folder: ROWS,
    "generator": lambda folder: (row for row in ROWS),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_same_examples_from_everywhere(source, tmp_path):
    dataset = read(SOURCES[source](tmp_path))
    assert list(dataset) == EXAMPLES
    assert list(dataset) == EXAMPLES  # and again
    assert (dataset.kind, len(dataset), dataset.labels) == ("text", 3, ("bad", "good"))
    assert (dataset.splits, dataset.columns, dataset.skipped) == (("train", "test"), (), ())


def test_texts_and_tuples():
    assert list(read(["a b", "c"])) == [Example("a b", id="1"), Example("c", id="2")]
    assert list(read(pd.Series(["a b"]))) == [Example("a b", id="1")]
    assert list(read([("a b", 1), ("c", 0)])) == [Example("a b", 1, id="1"), Example("c", 0, id="2")]


@pytest.mark.parametrize(
    ("row", "kind", "found"),
    [
        ({"Sentence": "a", "Target": 1}, "text", "a"),
        ({"review": "a", "y": 1, "number": 3}, "text", "a"),
        ({"hypothesis": "b", "premise": "a", "Label": 1}, "pair", ("a", "b")),
        ({"sentence": "b", "question": "a", "CLASS": 1}, "pair", ("a", "b")),
        ({"question": "a", "context": "b", "text": "c", "label": 1}, "pair", ("a", "b")),
    ],
)
def test_columns_are_found_by_name(row, kind, found):
    dataset = read([row])
    assert (dataset.kind, next(iter(dataset)).input, dataset.labels) == (kind, found, (1,))


def test_columns_are_named():
    row = {"text": "a b", "one": "c", "two": "d", "label": 1, "gold": 2, "why": [0, 1, 1], "part": 7, "key": 5}
    named = read([row], pair=("one", "text"), label="gold", rationale="why", split="part", id="key")
    assert list(named) == [Example(("c", "a b"), 2, (False, True, True), "7", "5")]
    assert read([row], text="one").inputs() == ["c"]
    with pytest.raises(
        InputError, match="label='golden' is not a column of source .a list.. There are 'text', 'one', "
    ):
        read([row], label="golden")
    with pytest.raises(InputError, match="has the columns 'a', 'b', none .* text='…', pair="):
        read([{"a": "x", "b": "y"}])
    with pytest.raises(OptionError, match="text and columns are given"):
        read([row], text="text", columns=["one"])
    with pytest.raises(OptionError, match="label='one' is part of the input"):
        read([row], columns=["one", "two"], label="one")
    with pytest.raises(OptionError, match="pair=.'one',. must name two columns"):
        read([row], pair=("one",))
    with pytest.raises(OptionError, match="columns=.'one', 'one'. must name at least one column, and each once"):
        read([row], columns=["one", "one"])
    with pytest.raises(OptionError, match="on_bad='ignore'"):
        read([row], on_bad="ignore")


@pytest.mark.parametrize(
    ("cells", "labels"),
    [
        (["1", "0", "10"], (0, 1, 10)),
        (["1.0", "0", "-2."], (-2, 0, 1)),
        (["1.5", "0", "1e-3"], (0.0, 0.001, 1.5)),
        (["1", "no", "0"], ("0", "1", "no")),
        (["1_0", "2", "nan"], ("1_0", "2", "nan")),
    ],
)
def test_labels_of_csv(cells, labels, tmp_path):
    dataset = read(write_csv(tmp_path / "rows.csv", [{"text": "a", "label": cell} for cell in cells]))
    assert dataset.labels == labels
    assert (
        {type(label) for label in dataset.labels} == {type(example.label) for example in dataset} == {type(labels[0])}
    )


def test_labels_with_types_keep_them():
    assert read([("a", "1"), ("b", "2")]).labels == ("1", "2")
    assert read([("a", 1.0), ("b", 2.0)]).labels == (1.0, 2.0)
    assert [type(one.label) for one in read([("a", np.int64(3)), ("b", np.float32(2))])] == [int, float]
    assert read([("a", 1), ("b", "one")]).labels == ("1", "one")
    assert read([(f"a {number}", number) for number in range(10_001)]).labels == ()  # a quantity


def test_labels_that_the_model_knows(tmp_path):
    rows = [{"text": "a", "label": "1"}, {"text": "b", "label": "2"}, {"text": "c", "label": "x"}]
    path = write_csv(tmp_path / "rows.csv", rows)
    dataset = read(path, labels=["1", "2", "3"], on_bad="skip")
    assert dataset.labels == ("1", "2")
    assert dataset.skipped == (BadRow(3, "label 'x' is not one the model knows: '1', '2', '3'"),)
    assert read(path, labels=[1, 2], on_bad="skip").labels == (1, 2)
    assert read([("a", 1.0), ("b", 0.0)], labels=[0, 1]).labels == (0, 1)
    with pytest.raises(InputError, match="row 1: label 3 is not one the model knows: 'bad', 'good'"):
        read([("a", 3)], labels=("bad", "good"))


def test_tables(tmp_path):
    rows = [{"age": "39", "pay": "1.5", "work": "none", "zip": "x1", "income": ">50K"}]
    rows += [{"age": "40", "pay": "2", "work": "state", "zip": "22", "income": "<=50K"}]
    path = write_csv(tmp_path / "rows.csv", rows)
    dataset = read(path, columns=["pay", "age", "zip"], label="income")
    assert (dataset.kind, dataset.columns, dataset.labels) == ("table", ("pay", "age", "zip"), ("<=50K", ">50K"))
    assert dataset.inputs() == [{"pay": 1.5, "age": 39, "zip": "x1"}, {"pay": 2.0, "age": 40, "zip": "22"}]
    assert [type(cell) for cell in dataset.inputs()[1].values()] == [float, int, str]
    typed = read(pd.DataFrame({"a": [1, 2], "b": [1.0, 2.0], "c": ["1", "2"]}), columns=["a", "b", "c"])
    assert typed.inputs() == [{"a": 1, "b": 1.0, "c": "1"}, {"a": 2, "b": 2.0, "c": "2"}]
    assert read([{"a": 1, "mask": [1]}], columns="a").sample(1).inputs() == [{"a": 1}]


def test_cells_that_do_not_fit_their_column(tmp_path):
    rows = [{"age": age, "kind": kind} for age, kind in zip(["1", "2", "old", "4", ""], "abcd1", strict=True)]
    dataset = read(write_csv(tmp_path / "rows.csv", rows), columns=["age", "kind"], on_bad="skip")
    assert dataset.inputs() == [
        {"age": 1, "kind": "a"}, {"age": 2, "kind": "b"}, {"age": 4, "kind": "d"}, {"age": None, "kind": "1"}
    ]  # fmt: skip
    assert dataset.skipped == (BadRow(3, "'age' holds 'old', and most of its cells are numbers"),)
    frame = pd.DataFrame({"a": [1, 2.5, "3", np.nan, [4]], "b": ["x", "y", 3, "z", "z"]}, dtype=object)
    typed = read(frame, columns=["a", "b"], on_bad="skip")
    assert typed.inputs() == [{"a": 1, "b": "x"}, {"a": 2.5, "b": "y"}, {"a": None, "b": "z"}]
    assert [bad.row for bad in typed.skipped] == [3, 5]
    assert typed.skipped[1].problem == "'a' holds [4], a list"
    mostly_missing = pd.DataFrame({"a": ["x", np.nan, np.nan, "y"]}, dtype=object)
    whole = read(mostly_missing, columns=["a"], on_bad="skip")
    assert whole.inputs() == [{"a": "x"}, {"a": "y"}]
    assert whole.skipped[0].problem == "all of its columns are missing or empty"


@pytest.mark.parametrize(
    ("cell", "mask"),
    [
        ([1, 0, 1], (True, False, True)),
        ((True, False, False), (True, False, False)),
        ("[0, 1, 1.0]", (False, True, True)),
        (np.array([0, 1, 0]), (False, True, False)),
        ([[0, 1], [2, 3]], (True, False, True)),
        (np.array([[1, 3]]), (False, True, True)),
        ("[[0, 2], [1, 3]]", (True, True, True)),
        ([[0, 1], [2, 2]], (True, False, False)),
        ("[]", (False, False, False)),
        (None, None),
        (float("nan"), None),
        ("", None),
    ],
)
def test_rationales(cell, mask):
    (example,) = read([{"text": " a  b\nc ", "mask": cell}])
    assert example.rationale == mask
    (table,) = read([{"x": 1, "y": 2, "z": 3, "mask": cell}], columns=["x", "y", "z"])
    assert table.rationale == mask


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ([1, 0], "its rationale has 2 entries for 3 words"),
        ([[0, 1, 0]], "its rationale has 1 entries for 3 words"),
        ([1, 0, 2], "its rationale [1, 0, 2] holds neither 0 and 1 nor [start, end) pairs"),
        ([[0, 4]], "its rationale [0, 4) is not within its 3 words"),
        ([[2, 1]], "its rationale [2, 1) is not within its 3 words"),
        ([[-1, 2]], "its rationale [-1, 2) is not within its 3 words"),
        ([[0.0, 1.0]], "its rationale [0.0, 1.0) is not within its 3 words"),
        ("0 1 0", "its rationale '0 1 0' is not a list"),
        (7, "its rationale 7 is not a list"),
    ],
)
def test_rationales_that_do_not_fit(cell, problem):
    assert read([{"text": "a"}, {"text": "a b c", "rationale": cell}], on_bad="skip").skipped == (BadRow(2, problem),)


BAD = {
    "empty.csv": ("text,label\na,1\n,1\n", "'text' is missing or empty"),
    "blank.tsv": ("text\tlabel\na\t1\n  \t1\n", "'text' is missing or empty"),
    "no_label.csv": ("text,label\na,1\nb,\n", "'label' is missing or empty"),
    "few.csv": ("text,label\na,1\nb\n", "has 1 fields; the header has 2"),
    "many.csv": ("text,label\na,1\nb,c,1\n", "has 3 fields; the header has 2"),
    "quote.csv": ('text,label\na,1\n"b" c,1\n', "does not parse: ',' expected after '\"'. Write long"),
    "open.csv": ('text,label\na,1\n"b,1\n', "does not parse: unexpected end of data"),
    "long.csv": (f"text,label\na,1\n{'b' * 200_000},1\n", "does not parse: field larger than field limit"),
    "swallowed.tsv": ('text\tlabel\na\t1\n"b\t1\nc"\t1\n', "holds a tab within quotes"),
    "bytes.csv": (b"text,label\na,1\nna\xefve,1\n", "'text' holds bytes that are not in the encoding: 'na"),
    "bytes.jsonl": (b'{"text": "a"}\n{"text": "na\xefve"}\n', "'text' holds bytes that are not in the encoding"),
    "half.jsonl": ('{"text": "a"}\n\n{"text": "b"\n', "does not parse as JSON: Expecting ',' delimiter"),
    "deep.jsonl": ('{"text": "a"}\n' + "[" * 100_000, "does not parse as JSON"),
    "list.jsonl": ('{"text": "a"}\n["b", 1]\n', "['b', 1] is no JSON object"),
    "null.jsonl": ('{"text": "a"}\n{"text": null}\n', "'text' is missing or empty"),
    "absent.jsonl": ('{"text": "a"}\n{"texts": "b"}\n', "'text' is missing or empty"),
    "nan.jsonl": ('{"text": "a"}\n{"text": NaN}\n', "'text' is missing or empty"),
    "number.jsonl": ('{"text": "a"}\n{"text": 5}\n', "'text' holds 5, a int and not a text"),
    "nested.jsonl": ('{"text": "a", "label": 1}\n{"text": "b", "label": [1]}\n', "'label' holds [1], a list"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_of_files(name, tmp_path):
    content, problem = BAD[name]
    path = as_file(tmp_path / name, content)
    dataset = read(path, on_bad="skip")
    assert dataset.inputs() == ["a"]
    (bad,) = dataset.skipped
    assert (bad.row, problem in bad.problem) == (2, True)
    assert repr(dataset).endswith("; 1 rows skipped)")
    with pytest.raises(InputError) as raised:
        read(path)
    assert "1 of 2 rows cannot be used (1 " in str(raised.value)
    assert f"\n  row 2: {problem}" in str(raised.value)


def test_bad_rows_of_frames_and_lists():
    frame = pd.DataFrame({"text": ["a", None, np.nan, 3, b"x", pd.NA, pd.NaT, "\ud800"]}, dtype=object)
    assert [bad.row for bad in read(frame, on_bad="skip").skipped] == [2, 3, 4, 5, 6, 7, 8]
    skipped = read(["a", 3, ("b", 1, 2), {}], on_bad="skip").skipped
    assert [bad.row for bad in skipped] == [2, 3, 4]
    assert skipped[1].problem == "('b', 1, 2) is neither a mapping nor a text nor (text, label)"
    pair = read([{"premise": "a", "hypothesis": "b"}, {"premise": "a", "hypothesis": ""}], on_bad="skip")
    assert pair.skipped == (BadRow(2, "'hypothesis' is missing or empty"),)


def test_one_error_reports_all():
    rows = [{"text": "good", "label": 1}] * 10 + [{"text": "", "label": 1}] * 30 + [{"text": 5, "label": 1}] * 2
    with pytest.raises(InputError) as raised:
        read(rows)
    lines = str(raised.value).splitlines()
    assert lines[0] == "source (a list): 32 of 42 rows cannot be used (30 missing or empty, 2 no text)."
    assert lines[1:21] == [f"  row {row}: 'text' is missing or empty" for row in range(11, 31)]
    assert lines[21:] == [
        "  … and 12 more",
        "Rows are counted from 1, without header and blank lines. Correct them, or leave them out: regard.data.read(…, on_bad='skip'), --on-bad skip.",
    ]
    assert len(read(rows, on_bad="skip").skipped) == 32


def test_rows_are_counted_without_header_and_blank_lines(tmp_path):
    path = as_file(tmp_path / "rows.csv", '\ntext,label\n"two\nlines",1\n\n,1\n\n"b",1\n')
    dataset = read(path, on_bad="skip")
    assert dataset.skipped == (BadRow(2, "'text' is missing or empty"),)
    assert [(example.id, example.input) for example in dataset] == [("1", "two\nlines"), ("3", "b")]


def test_encodings(tmp_path):
    latin = as_file(tmp_path / "latin.csv", "text\nnaïve\n", encoding="latin-1")
    assert read(latin, encoding="latin-1").inputs() == ["naïve"]
    assert read(as_file(tmp_path / "mark.csv", "text\na\n", encoding="utf-8-sig")).inputs() == ["a"]
    assert read(as_file(tmp_path / "mark.jsonl", '{"text": "a"}', encoding="utf-8-sig")).inputs() == ["a"]
    wide = as_file(tmp_path / "wide.csv", "text\na\n", encoding="utf-16")
    assert read(wide, encoding="utf-16").inputs() == ["a"]
    with pytest.raises(InputError, match="header that cannot be read in encoding='utf-8'"):
        read(wide)
    with pytest.raises(InputError, match="cannot be read: UTF-16 stream does not start with BOM"):
        read(latin, encoding="utf-16")
    with pytest.raises(OptionError, match="encoding='utf-9' is not known"):
        read(latin, encoding="utf-9")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", ""),
        ("a.csv", "text,label\n"),
        ("a.csv", "\n\n"),
        ("a.jsonl", ""),
        ("a.jsonl", "\n \n"),
        ("a.tsv", "text"),
    ],
)
def test_empty_files(name, content, tmp_path):
    with pytest.raises(EmptyInput):
        read(as_file(tmp_path / name, content))


def test_nothing_left(tmp_path):
    for source in ([], iter(()), pd.DataFrame({"text": []}), datasets.Dataset.from_dict({"text": []})):
        with pytest.raises(EmptyInput, match="holds no rows of data"):
            read(source)
    with pytest.raises(
        EmptyInput, match="2 of 2 rows cannot be used .2 missing or empty.(.|\n)*There is no other row."
    ):
        read(["", " "], on_bad="skip")
    only_bad = as_file(tmp_path / "a.jsonl", "[]\nx\n")
    with pytest.raises(EmptyInput, match="1 no object, 1 not JSON"):
        read(only_bad, on_bad="skip")
    with pytest.raises(InputError, match="row 2: does not parse as JSON"):
        read(only_bad)
    with pytest.raises(InputError, match="row 1: has no cells"):
        read([{}])


def test_sources_that_cannot_be_read(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="is not there. Check the path"):
        read(tmp_path / "none.csv")
    with pytest.raises(InputError, match="is a folder. Pass one of its files"):
        read(tmp_path)
    with pytest.raises(InputError, match="a.xlsx' ends in none of .csv, .tsv"):
        read(as_file(tmp_path / "a.xlsx", "x"))
    with pytest.raises(InputError, match="has more than one column 'text'"):
        read(as_file(tmp_path / "a.csv", "text,text\na,b\n"))
    with pytest.raises(InputError, match="has more than one column 'text'"):
        read(pd.DataFrame([["a", "b"]], columns=["text", "text"]))
    with pytest.raises(InputError, match="has a header that cannot be read"):
        read(as_file(tmp_path / "a.csv", '"te"xt,label\na,b\n'))
    with pytest.raises(InputError, match="cannot be read: Not a gzipped file"):
        read(as_file(tmp_path / "a.csv.gz", "text\na\n"))
    half = gzip.compress(b"text\n" + bytes(range(97, 123)) * 1000)[:-20]
    with pytest.raises(InputError, match="cannot be read: Compressed file ended"):
        read(as_file(tmp_path / "b.csv.gz", half))
    with pytest.raises(InputError, match="is no Parquet file"):
        read(as_file(tmp_path / "a.parquet", "text"))
    with pytest.raises(InputError, match="has the keys 'train', 'test'. Pass one of its values"):
        read({"train": ["a"], "test": ["b"]})
    with pytest.raises(InputError, match="a int. gives no rows"):
        read(3)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(InputError, match="pip install 'regard.parquet.'"):
        read(tmp_path / "a.parquet")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(lambda text: text.split())


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(texts=st.lists(TEXT, min_size=1, max_size=5))
def test_every_text_comes_back(texts, tmp_path):
    rows = [{"text": text, "id": str(row)} for row, text in enumerate(texts)]
    for path in (write_csv(tmp_path / "a.csv", rows), write_jsonl(tmp_path / "a.jsonl", rows)):
        assert read(path).inputs() == texts
    pd.DataFrame(rows).to_parquet(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet").inputs() == texts


def test_views_and_samples():
    rows = [{"text": f"text {row}", "split": "even" if row % 2 == 0 else "odd", "label": row} for row in range(100)]
    dataset = read(rows)
    odd = dataset.where(split="odd")
    assert (len(odd), odd.splits, odd.labels) == (50, ("odd",), dataset.labels)
    assert odd.inputs() == [f"text {row}" for row in range(1, 100, 2)]
    drawn = odd.sample(7, seed=3)
    assert drawn.inputs() == odd.sample(7, seed=3).inputs() != odd.sample(7, seed=4).inputs()
    assert (len(drawn), len(list(drawn)), drawn.splits) == (7, 7, ("odd",))
    places = [odd.inputs().index(text) for text in drawn.inputs()]
    assert places == sorted(set(places))
    assert odd.sample(50).inputs() == odd.sample(99).inputs() == odd.inputs()
    counts = np.zeros(100)
    for seed in range(400):
        for example in dataset.sample(10, seed=seed):
            counts[example.label] += 1
    assert np.abs(counts - 40).max() < 5 * np.sqrt(400 * 0.1 * 0.9)  # each is as likely as any other
    with pytest.raises(OptionError, match="split='dev' is not known. Choose one of 'even', 'odd'"):
        dataset.where(split="dev")
    with pytest.raises(OptionError, match="There are no splits"):
        read(["a"]).where(split="dev")
    for size in (0, 2.5, None, [3, 4]):
        with pytest.raises(OptionError, match="size="):
            dataset.sample(size)


def test_frames_can_be_read_again(tmp_path):
    dataset = read(ROWS)
    assert list(dataset.frame().columns) == ["text", "label", "rationale", "split", "id"]
    assert list(read(dataset.frame())) == EXAMPLES
    dataset.frame().to_csv(tmp_path / "a.csv", index=False)
    assert list(read(tmp_path / "a.csv")) == EXAMPLES
    pair = Dataset.of([Example(("a b", "c"), 1, (True, False, False)), Example(("d", "e"), 2)])
    assert list(pair.frame().columns) == ["first", "second", "label", "rationale"]
    assert [one.rationale for one in read(pair.frame())] == [(True, False, False), None]
    table = Dataset.of([Example({"id": 3, "x": "u"}, "yes", id="first")])
    assert table.frame().to_dict("records") == [{"id": 3, "x": "u", "label": "yes", "id_": "first"}]


def test_datasets_in_memory():
    held = [Example("a b", "x", (True, False), "train"), Example("c", "y")]
    dataset = Dataset.of(held)
    assert list(dataset) == list(dataset) == held
    assert (dataset.kind, dataset.labels, dataset.splits, len(dataset)) == ("text", ("x", "y"), ("train",), 2)
    assert Dataset.of([Example({"p": 1, "q": "u"})]).columns == ("p", "q")
    assert (
        repr(Dataset.of([Example("a", label) for label in range(7)]))
        == "Dataset(text; 7 examples; labels 0, 1, 2, 3, 4, …)"
    )
    assert (
        repr(Dataset.of([Example(("a", "b"), split="dev")]))
        == "Dataset(pair; 1 examples; no labels listed; splits dev)"
    )
    with pytest.raises(EmptyInput, match="examples is empty"):
        Dataset.of([])
    for wrong, problem in {
        Example(("a", "b")): r"examples\[1\]: its input is a pair, that of the first a text",
        Example("a b", rationale=(True,)): "its rationale has 1 entries for 2 words",
        Example(" "): "its text is empty",
        Example(3): "input=3 is neither a text nor a tuple of two nor a mapping",
        Example(("a", 3)): "input=.'a', 3. is neither",
    }.items():
        with pytest.raises(InputError, match=problem):
            Dataset.of([Example("fine"), wrong])
    with pytest.raises(InputError, match="a pair has 2 texts, this one 3"):
        Dataset.of([Example(("a", "b", "c"))])
    with pytest.raises(InputError, match="its columns are q; those of the first are p"):
        Dataset.of([Example({"p": 1}), Example({"q": 1})])
    with pytest.raises(InputError, match="its rationale has 2 entries for 1 columns"):
        Dataset.of([Example({"p": 1}, rationale=(True, False))])


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_files_are_streamed(ending, tmp_path):
    """50 MB go through a few: reading, iterating, and drawing ten."""
    path = tmp_path / f"large.{ending}"
    text = "word " * 1000
    with path.open("w") as file:
        file.write("text,label\n" if ending == "csv" else "")
        for row in range(10_500):
            line = (
                f"{text}{row},{row}.5" if ending == "csv" else json.dumps({"text": f"{text}{row}", "label": row + 0.5})
            )
            file.write(line + "\n")
    assert path.stat().st_size > 50e6
    tracemalloc.start()
    try:
        dataset = read(path)
        total = sum(example.label for example in dataset)
        drawn = dataset.sample(10)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(dataset), dataset.labels, len(list(drawn))) == (10_500, (), 10)
    assert total == sum(range(10_500)) + 5_250
    assert peak < 4e6


def test_real_files():
    if not SHARED.exists():
        pytest.skip("/work/shared/data is not there")
    columns = ["age", "workclass", "education_num", "capital_gain"]
    adult = read(SHARED / "tabular/adult/train.csv", columns=columns, label="income")
    assert (len(adult), adult.labels) == (32_561, ("<=50K", ">50K"))
    frame = pd.read_csv(SHARED / "tabular/adult/train.csv", keep_default_na=False)
    assert adult.inputs() == frame[columns].to_dict("records")
    gap = read(SHARED / "gap/gap-test.tsv")
    assert (len(gap), next(iter(gap)).id) == (2000, "test-1")
    imdb = read(SHARED / "imdb/test.jsonl.gz").sample(20)
    assert len(imdb) == len(imdb.inputs()) == 20
