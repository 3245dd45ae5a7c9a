"""Files with changed bytes: a small part of ``make torture``, and what it found."""

from __future__ import annotations

import json
import time

import pandas as pd
import pytest
from fuzzing import fuzz, seeds

from regard.data import read, read_eraser
from regard.data.reading import to_mask
from regard.data.sources import Unusable
from regard.errors import InputError


def test_changed_files_are_read_or_refused(tmp_path):
    figures = fuzz(400, 0, tmp_path)
    assert sum(figures.values()) == 400
    assert figures["read"] > 50
    assert figures["InputError"] > 100


def test_damaged_pages_of_parquet_are_told(tmp_path):
    whole = seeds()["texts.parquet"]
    path = tmp_path / "rows.parquet"
    path.write_bytes(whole[:4] + b"\xff" * 40 + whole[44:])
    with pytest.raises(InputError, match="rows.parquet' is damaged: .* Write it anew."):
        read(path)
    path.write_bytes(whole.replace(b"a dull film", b"a d\xffll film"))
    with pytest.raises(InputError, match="rows.parquet' is damaged: "):
        read(path)


@pytest.mark.parametrize("cell", ["[" * 5000, '{"a":' * 3000, "{}", '""', '{"0": 1}', "3"])
def test_a_rationale_that_is_no_list(cell):
    with pytest.raises(Unusable, match="is not a list"):
        to_mask(cell, 0)


def test_a_number_with_too_many_digits_is_told(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"text,label\na film,1\nb,{'9' * 5000}\n")
    with pytest.raises(InputError, match="row 2: 'label' holds '9999.*', a number with 5000 digits"):
        read(path)


def test_a_long_row_of_digits_takes_no_time(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(f"text,label\na film,{'9' * 130_000}x\n")
    began = time.process_time()
    assert len(read(path)) == 1
    assert time.process_time() - began < 1  # it was half a minute


@pytest.mark.parametrize("part", ["classification", "annotation_id", "query"])
def test_lone_surrogates_in_an_annotation_are_told(part, tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "d").write_text("a film")
    row = {"annotation_id": "a", "classification": "NEG", "query": "q", "docids": ["d"], "evidences": []}
    (tmp_path / "test.jsonl").write_text(json.dumps(row | {part: "\udc8f"}))
    with pytest.raises(InputError, match="what is no text in UTF-8"):
        read_eraser(tmp_path)
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    assert isinstance(read_eraser(tmp_path).frame(), pd.DataFrame)
