"""ERASER's format: what is written is read, what the benchmark asks of results holds, and the real reviews."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from regard.data import Dataset, Example, read_eraser, write_eraser, write_predictions
from regard.errors import EmptyInput, InputError, OptionError

MOVIES = Path("/work/shared/data/eraser_movies")
TEXTS = [
    Example(
        "a dull film .\nit never ends .", "NEG", (False, True, False, False, False, True, True, False), "train", "n1"
    ),
    Example("so moving", "POS", (False, False), "train", "p 1.txt"),
    Example(" größer\r\nals je 🎬\n", "POS", None, "test", "p2"),
    Example("plain", None, (True,), "dev", "x"),
    Example("a b", 1, (True, True), None, "y"),
]
PAIRS = [
    Example(("a dull film", "is it good ?"), "no", (False, True, False, False, False, False, False), "val", "1"),
    Example(("so moving", "is it good ?"), "yes", (True, True, False, False, False, False), "train", "2"),
]


def folder_of(path, rows, **docs):
    (path / "docs").mkdir(parents=True)
    for name, text in docs.items():
        (path / "docs" / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    (path / "train.jsonl").write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    )
    return path


def evidence(docid, start, end):
    return {"docid": docid, "start_token": start, "end_token": end, "text": "…"}


def row(name="d", evidences=(), **more):
    return {"annotation_id": name, "classification": "POS", "evidences": list(evidences), **more}


@pytest.mark.parametrize("examples", [TEXTS, PAIRS])
def test_what_is_written_is_read(examples, tmp_path):
    dataset = Dataset.of(examples)
    again = read_eraser(write_eraser(dataset, tmp_path / "new"))
    assert sorted(again, key=lambda one: one.id) == sorted(examples, key=lambda one: one.id)
    assert (again.kind, again.labels, len(again)) == (dataset.kind, dataset.labels, len(dataset))
    assert list(read_eraser(tmp_path / "new", split="train")) == [one for one in examples if one.split == "train"]
    rows = [json.loads(line) for line in (tmp_path / "new" / "train.jsonl").read_text().splitlines()]
    wanted = {"annotation_id", "classification", "docids", "evidences", "query", "query_type"}
    assert all(set(one) == wanted for one in rows)  # the benchmark's reader accepts no others


def test_splits_come_in_order(tmp_path):
    again = read_eraser(write_eraser(Dataset.of(TEXTS), tmp_path / "new"))
    assert [one.split for one in again] == ["train", "train", "test", None, "dev"]
    assert again.splits == ("train", "test", "dev")


def test_evidence_becomes_a_mask(tmp_path):
    groups = [[evidence("doc", 1, 3), evidence("doc", 2, 4)], [evidence("doc", 6, 7)]]
    rows = [row("one", groups), row("doc"), row("two", groups, query="which one"), row("three", docids=["doc"])]
    folder = folder_of(tmp_path / "f", [*rows[:2], rows[3]], doc="a b c\nd  e f g\n")
    examples = list(read_eraser(folder))
    assert examples[0] == Example(
        "a b c\nd  e f g\n", "POS", (False, True, True, True, False, False, True), "train", "one"
    )
    assert [one.rationale for one in examples[1:]] == [(False,) * 7] * 2
    folder_of(tmp_path / "g", [rows[2]])
    (pair,) = read_eraser(tmp_path / "g" / "train.jsonl", docs=folder / "docs", split="mine")
    assert pair.input == ("a b c\nd  e f g\n", "which one")
    assert pair.rationale == (*examples[0].rationale, False, False)
    assert pair.split == "mine"


BAD = {
    "several documents": (row("d", [[evidence("d", 0, 1), evidence("e", 0, 1)]]), "has 2 documents (d, e), not one"),
    "several named": (row("d", docids=["d", "e"]), "has 2 documents (d, e), not one"),
    "no document": (row("none"), "its document 'none' is not in "),
    "outside": (row("../train.jsonl"), "its document '../train.jsonl' is not in "),
    "too far": (row("d", [[evidence("d", 1, 3)]]), "its rationale [1, 3) is not within its 2 words"),
    "unknown place": (row("d", [[evidence("d", -1, -1)]]), "its rationale [-1, -1) is not within"),
    "no places": (row("d", [[{"docid": "d"}]]), "evidence without docid, start_token and end_token: 'start_token'"),
    "no groups": (row("d", [3]), "evidence without docid"),
    "no name": ({"classification": "POS"}, "has no annotation_id"),
    "no label": (row("d") | {"classification": ["POS"]}, "its classification is not a label"),
    "a query": (row("d", query="why"), "some rows have a query and some have none"),
    "empty": (row("empty"), "its document 'empty' is empty"),
    "bytes": (row("latin"), "its document 'latin', query, id or label holds what is no text in UTF-8"),
    "broken": ('{"annotation_id": ', "does not parse as JSON"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows(name, tmp_path):
    wrong, problem = BAD[name]
    folder = folder_of(tmp_path / "f", [row("d"), wrong], d="a b", e="c", empty=" \n", latin=b"na\xefve")
    dataset = read_eraser(folder, on_bad="skip")
    assert [one.id for one in dataset] == ["d"]
    (bad,) = dataset.skipped
    assert (bad.row, bad.problem.startswith("train.jsonl: "), problem in bad.problem) == (2, True, True)
    with pytest.raises(InputError, match="1 of 2 rows cannot be used"):
        read_eraser(folder)


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="is neither a JSONL file nor a folder with train.jsonl"):
        read_eraser(tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(InputError, match="docs' is not a folder"):
        read_eraser(tmp_path)
    (tmp_path / "docs").mkdir()
    with pytest.raises(EmptyInput):
        read_eraser(tmp_path)
    with pytest.raises(OptionError, match="split='dev' is not known. Choose one of 'train'"):
        read_eraser(tmp_path, split="dev")


def test_what_cannot_be_written(tmp_path):
    for examples, problem in [
        ([Example("a", id="1"), Example("b", id="1")], "two examples with id='1'"),
        ([Example("a")], "id or split '' cannot name a file"),
        ([Example("a", id="..")], "id or split '..' cannot name a file"),
        ([Example("a", id="b/c")], "id or split 'b/c' cannot name a file"),
        ([Example({"x": 1}, id="1")], "rows of a table"),
        ([Example(("a", "b"), rationale=(False, True), id="1")], "has words of the query"),
    ]:
        with pytest.raises(InputError, match=problem):
            write_eraser(Dataset.of(examples), tmp_path / problem.replace("/", ""))
    full = write_eraser(Dataset.of([Example("a", id="1")]), tmp_path / "full")
    with pytest.raises(InputError, match="is not empty. Name a new one"):
        write_eraser(Dataset.of([Example("a", id="1")]), full)


def check_results(path, dataset):
    """What the benchmark's script asks of each row before it scores any, by its own documentation."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [one["annotation_id"] for one in rows] == [one.id for one in dataset]
    for one, example in zip(rows, dataset, strict=True):
        (found,) = one["rationales"]
        document = example.input if isinstance(example.input, str) else example.input[0]
        assert len(found["soft_rationale_predictions"]) == len(document.split())
        places = [
            p for span in found["hard_rationale_predictions"] for p in range(span["start_token"], span["end_token"])
        ]
        assert len(places) == len(set(places)) > 0
        assert set(places) <= set(range(len(document.split())))
        assert isinstance(one["classification"], str)
        assert sum(one["classification_scores"].values()) == pytest.approx(1)
        assert one["classification"] in one["classification_scores"]
    return rows


def test_predictions(tmp_path):
    dataset = Dataset.of(PAIRS)
    scores = [[0.1, 0.5, 0.4, 9, 9, 9, 9], np.array([-1.0, 2, 9, 9, 9, 9])]
    path = write_predictions(tmp_path / "a.jsonl", dataset, scores, predicted=["no", "no"], share=0.6)
    rows = check_results(path, dataset)
    assert rows[0]["rationales"] == [
        {
            "docid": "1",
            "hard_rationale_predictions": [{"start_token": 1, "end_token": 3}],  # 0.6 · 3 words are two
            "soft_rationale_predictions": [0.1, 0.5, 0.4],
        }
    ]
    assert rows[1]["rationales"][0]["hard_rationale_predictions"] == [{"start_token": 1, "end_token": 2}]
    assert rows[1]["classification_scores"] == {"no": 1.0, "yes": 0.0}
    sure = [{"no": 0.75, "yes": 0.25}, {"no": 0.5, "yes": 0.5}]
    path = write_predictions(tmp_path / "b.jsonl", dataset, scores, predicted=["no", "no"], probabilities=sure)
    # People marked 1 of 3 and 2 of 2 words: two thirds on average.
    hard = [one["rationales"][0]["hard_rationale_predictions"] for one in check_results(path, dataset)]
    assert hard == [[{"start_token": 1, "end_token": 3}], [{"start_token": 1, "end_token": 2}]]


def test_predictions_name_the_document_of_the_annotation(tmp_path):
    folder = folder_of(tmp_path / "f", [row("one", [[evidence("doc", 0, 1)]])], doc="a b c")
    dataset = read_eraser(folder)
    path = write_predictions(tmp_path / "a.jsonl", dataset, [[1, 2, 1]], predicted=["POS"], gold=folder)
    (found,) = check_results(path, dataset)[0]["rationales"]
    assert found["docid"] == "doc"
    assert found["hard_rationale_predictions"] == [{"start_token": 1, "end_token": 2}]


def test_predictions_that_cannot_be_written(tmp_path):
    dataset = Dataset.of([Example("a b", "x", id="1")])
    with pytest.raises(OptionError, match="share=None takes the mean share"):
        write_predictions(tmp_path / "a", dataset, [[1, 2]], predicted=["x"])
    with pytest.raises(OptionError, match="share=0 is not above 0"):
        write_predictions(tmp_path / "a", dataset, [[1, 2]], predicted=["x"], share=0)
    with pytest.raises(InputError, match="predicted has 0 entries for 1 examples"):
        write_predictions(tmp_path / "a", dataset, [[1, 2]], predicted=[], share=0.5)
    for scores in ([[1, 2, 3]], [[1, float("nan")]]):
        with pytest.raises(InputError, match="scores of '1' have shape .* for 2 words"):
            write_predictions(tmp_path / "a", dataset, scores, predicted=["x"], share=0.5)
    assert not (tmp_path / "a").exists()


def test_real_reviews(tmp_path):
    if not MOVIES.exists():
        pytest.skip(f"{MOVIES} is not there")
    reviews = read_eraser(MOVIES)
    assert {split: len(reviews.where(split=split)) for split in reviews.splits} == {
        "train": 1600,
        "val": 200,
        "test": 199,
    }
    assert (reviews.kind, reviews.labels) == ("pair", ("NEG", "POS"))
    rows = [json.loads(line) for line in (MOVIES / "val.jsonl").read_text().splitlines()]
    val = reviews.where(split="val")
    for one, example in zip(rows, val, strict=True):
        assert (one["annotation_id"], one["query"]) == (example.id, example.input[1])
        marked = {word for place, word in enumerate(example.words) if example.rationale[place]}
        said = {word for group in one["evidences"] for found in group for word in found["text"].split()}
        assert marked == said
    again = read_eraser(write_eraser(val, tmp_path / "new"))
    assert list(again) == list(val)
    scores = [np.arange(len(one.words)) for one in val]
    check_results(write_predictions(tmp_path / "a.jsonl", val, scores, predicted=["POS"] * 200), val)
