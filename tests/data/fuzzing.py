"""Data files with bytes changed at random: what comes of them is a dataset or an exception of regard's own.

Shared by the tests and by ``make torture``.
"""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path

import pandas as pd

from regard.data import Dataset, read, read_eraser
from regard.errors import RegardError

TEXTS = [
    {"text": "a dull film", "label": "bad", "rationale": [0, 1, 0], "split": "train", "id": "one"},
    {"text": 'so "moving",\nreally', "label": "good", "rationale": [[1, 3]], "split": "train", "id": "two"},
    {"text": "größer als je 🎬", "label": "good", "rationale": [], "split": "test", "id": "three"},
]
PAIRS = [
    {"premise": "it rains", "hypothesis": "it is wet", "label": 1},
    {"premise": "a", "hypothesis": "b", "label": 0},
]
TABLE = [{"age": 31, "income": 1.5, "city": "Bern", "y": 0}, {"age": 64, "income": -2e3, "city": "Rom", "y": 1}]
# What files hold that no test of a single line thought of.
PIECES = [
    *(b'"', b",", b"\t", b"\n", b"\r", b"\r\n", b"\0", b"\xff", b"\xef\xbb\xbf", b"\xff\xfe", b"\x1a", b"{", b"}", b"[[0, 1]]"),
    *(b"\\ud800", b"\\udc00\\ud800", b"\\u0000", b"NaN", b"-Infinity", b"null", b"true", b"1e999", b"-0", b"0x10", b"1_0"),
    *("\u2028".encode(), "\u3000".encode(), "١٢".encode(), b"\xf0\x9f\x8e\xac", b"\xed\xa0\x80", b'{"a": 1}', b"{}", b"[]", b'""'),
    *(b"[[0, 99999999999999999999]]", b"[[-1, 2]]", b"[[0.5, 1]]", b'[["0", "1"]]', b"[null]", b"[[0, 1, 2]]", b"[true]"),
    *(b"9" * 5000, b"[" * 5000, b'{"a":' * 3000, b"x" * 140_000, b"text", b"label", b"id", b"rationale", b"docids"),
]  # fmt: skip


def seeds() -> dict[str, bytes]:
    """Whole files, by name."""
    held = {}
    for name, rows in {"texts": TEXTS, "pairs": PAIRS, "table": TABLE}.items():
        frame = pd.DataFrame(rows)
        written = frame.assign(rationale=frame["rationale"].map(json.dumps)) if "rationale" in frame else frame
        held[f"{name}.csv"] = written.to_csv(index=False).encode()
        held[f"{name}.tsv"] = written.to_csv(index=False, sep="\t").encode()
        held[f"{name}.jsonl"] = "".join(json.dumps(row) + "\n" for row in rows).encode()
        packed = io.BytesIO()
        written.to_parquet(packed, compression=None)  # so that changes reach the values and not only a checksum
        held[f"{name}.parquet"] = packed.getvalue()
    held["texts.csv.gz"] = gzip.compress(held["texts.csv"], mtime=0)
    held["texts.jsonl.gz"] = gzip.compress(held["texts.jsonl"], mtime=0)
    evidence = [[{"docid": "d", "start_token": 0, "end_token": 2, "text": "a dull"}]]
    row = {"annotation_id": "a", "classification": "NEG", "evidences": evidence, "query": "good ?", "docids": ["d"]}
    held["eraser/test.jsonl"] = (json.dumps(row) + "\n").encode() * 2
    held["eraser/docs/d"] = b"a dull film\nand long"
    return held


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Change a few places."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 6))):
        start = rng.randrange(len(changed) + 1)
        end = min(len(changed), start + rng.choice((1, 1, 2, 5, 20, 200)))
        kind = rng.randrange(7)
        if kind == 0 and start < len(changed):
            changed[start] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[start:end] = rng.randbytes(end - start)
        elif kind == 2:
            del changed[start:end]
        elif kind == 3:
            changed[start:start] = changed[start:end] * rng.choice((1, 2, 20))
        elif kind == 4:
            del changed[start:]
        elif kind == 5:
            changed[start:end] = rng.choice(PIECES)
        else:
            changed[start:start] = rng.choice(PIECES)
    return bytes(changed)


def look_at(dataset: Dataset, *, closely: bool) -> None:
    """Use a dataset, ``closely`` in all ways; what was promised about it must hold."""
    examples = list(dataset)
    assert len(examples) == len(dataset) > 0
    assert all(example.kind == dataset.kind for example in examples)
    assert all(example.rationale is None or len(example.rationale) == len(example.words) for example in examples)
    known = {example.label for example in examples if example.label is not None}
    assert set(dataset.labels) == known
    repr(dataset)
    if closely:
        dataset.frame(), dataset.inputs(), dataset.sample(1)
    for split in dataset.splits:
        assert sum(1 for _ in dataset.where(split=split)) == dataset.sizes[split]


def read_mutated(folder: Path, name: str, data: bytes, rng: random.Random) -> str:
    """Read a changed file; "read", or the name of the exception of regard's own. Any other exception gets out."""
    (folder / name).write_bytes(data)
    on_bad = rng.choice(("raise", "skip"))
    labels = rng.choice((None, ["bad", "good", 0, 1]))
    try:
        if name.startswith("eraser"):
            dataset = read_eraser(folder / "eraser", on_bad=on_bad)
        elif name.startswith("table"):
            dataset = read(folder / name, columns=["age", "income", "city"], on_bad=on_bad)
        else:
            dataset = read(folder / name, on_bad=on_bad, labels=labels)
        look_at(dataset, closely=rng.random() < 0.2)
    except RegardError as refusal:
        str(refusal).encode("utf-8", "replace")
        return type(refusal).__name__
    return "read"


def fuzz(times: int, seed: int, folder: Path) -> dict[str, int]:
    """Read so many changed files; how often what came of it."""
    whole = seeds()
    for name, data in whole.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    figures: dict[str, int] = {}
    for number in range(times):
        rng = random.Random(f"{seed}/{number}")
        name = rng.choice([*whole])
        data = mutate(whole[name], rng)
        try:
            outcome = read_mutated(folder, name, data, rng)
        except Exception as problem:
            raise AssertionError(f"file {number} of seed {seed}, {name}: {data[:300]!r}") from problem
        finally:
            (folder / name).write_bytes(whole[name])
        figures[outcome] = figures.get(outcome, 0) + 1
    return figures
