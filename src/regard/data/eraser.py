"""Human rationales in the format of the ERASER benchmark (DeYoung et al., 2020): read, written, and predicted."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.dataset import Dataset, Example
from regard.data.reading import OnBad, gather, to_mask
from regard.data.sources import UNDECODED, Unusable, read_json
from regard.errors import InputError, OptionError, choose
from regard.rationales import spans_of

ORDER = ("train", "val", "test")
NO_SPLIT = "all"  # the file of examples that belong to no split


def read_eraser(
    folder_or_jsonl: str | Path, *, docs: str | Path | None = None, split: str | None = None, on_bad: OnBad = "raise"
) -> Dataset:
    """Read annotated documents; evidence becomes the rationale over the document's words between white space.

    With a query the input is the pair (document, query), and no word of the query is a reason.

    Args:
        folder_or_jsonl: a folder with train.jsonl, val.jsonl, test.jsonl and docs/; or one such file.
        docs: folder with one document in each file. None: docs/ beside the JSONL files.
        split: read only this one. None: all of the folder.
        on_bad: "raise" reports all rows that cannot be used in one error; "skip" leaves them out and lists them in
            `Dataset.skipped`. Rows are counted within their file.

    Example::

        reviews = regard.data.read_eraser("movies", split="test")
        assert reviews.kind == "pair"  # each review comes with the question
    """
    choose("on_bad", on_bad, ("raise", "skip"))
    source = Path(folder_or_jsonl)
    files = _files(source)
    if split is not None and source.is_dir():
        choose("split", split, tuple(files))
        files = {split: files[split]}
    elif split is not None:
        files = {split: source}
    folder = Path(docs) if docs is not None else next(iter(files.values())).parent / "docs"
    if not folder.is_dir():
        raise InputError(f"docs={str(folder)!r} is not a folder. Pass the one that holds a file for each document.")
    return gather(lambda: _walk(files, folder), name=f"folder_or_jsonl={str(source)!r}", on_bad=on_bad)


def write_eraser(dataset: Dataset, folder: str | Path) -> Path:
    """Write texts, or pairs of a document and a query, so that `read_eraser` gives the same examples, split by split.

    Each needs an id of its own, which becomes the name of its document. Labels keep their type; the benchmark's own
    script wants texts. What belongs to no split goes to all.jsonl.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"folder={str(folder)!r} is not empty. Name a new one.")
    for example in dataset:
        document, row = _document(example), json.dumps(_annotation(example))
        file = folder / "docs" / _file_name(example.id)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            raise InputError(f"dataset has two examples with id={example.id!r}. Give each its own: it names a file.")
        with file.open("w", encoding="utf-8", newline="") as opened:
            opened.write(document)
        with (folder / f"{_file_name(example.split or NO_SPLIT)}.jsonl").open("a", encoding="utf-8") as rows:
            rows.write(row + "\n")
    return folder


def write_predictions(
    path: str | Path,
    dataset: Dataset,
    scores: Sequence[Sequence[float]],
    *,
    predicted: Sequence[str],
    probabilities: Sequence[Mapping[str, float]] | None = None,
    share: float | None = None,
    gold: str | Path | None = None,
) -> Path:
    """Write what a model looked at as ERASER's results, which the benchmark's own script scores.

    Args:
        path: of the JSONL file.
        dataset: texts, or pairs of a document and a query.
        scores: for each example one for each of its `words`; those of a query are not written.
        predicted: for each example its class.
        probabilities: for each example those of all classes. None: 1 for what was predicted, since the script accepts
            no class without them; it needs them only for comprehensiveness and sufficiency, which are not written.
        share: how much of a document the hard rationale is: its highest scores, at least one word. None: the mean
            share of the human rationales in this dataset, as in the paper.
        gold: the folder or JSONL that holds the annotations, where documents have other names than annotations.
    """
    examples = list(dataset)
    for name, given in {"scores": scores, "predicted": predicted, "probabilities": probabilities}.items():
        if given is not None and len(given) != len(examples):
            raise InputError(f"{name} has {len(given)} entries for {len(examples)} examples. Pass one for each.")
    share = _mean_share(examples) if share is None else share
    if not 0 < share <= 1:
        raise OptionError(f"share={share} is not above 0 and at most 1.")
    named = {} if gold is None else _documents(Path(gold))
    rows = []
    for place, example in enumerate(examples):
        label = str(predicted[place])
        if probabilities is None:
            sure = {str(one): 0.0 for one in dataset.labels} | {label: 1.0}
        else:
            sure = {str(one): float(value) for one, value in probabilities[place].items()}
        row = {
            "annotation_id": example.id,
            "rationales": [{"docid": named.get(example.id, example.id)} | _found(example, scores[place], share)],
            "classification": label,
            "classification_scores": sure,
        }
        rows.append(json.dumps(row) + "\n")
    path = Path(path)
    path.write_text("".join(rows), encoding="utf-8")
    return path


def _files(source: Path) -> dict[str, Path]:
    """The JSONL file of each split."""
    if source.is_file():
        return {source.stem: source}
    files = {file.stem: file for file in sorted(source.glob("*.jsonl"))}
    if not files:
        raise InputError(f"folder_or_jsonl={str(source)!r} is neither a JSONL file nor a folder with train.jsonl, ….")
    return {split: files[split] for split in (*ORDER, *files) if split in files}


def _walk(files: Mapping[str, Path], docs: Path) -> Iterator[tuple[int, Example | Unusable]]:
    """All rows of all files, each with its number within its file."""
    kind = None
    for split, file in files.items():
        for row, record in enumerate(read_json(file), 1):
            try:
                if isinstance(record, Unusable):
                    raise record
                example = _example(record, None if split == NO_SPLIT else split, docs)
                kind = kind or example.kind
                if example.kind != kind:
                    raise Unusable("not alike", "some rows have a query and some have none")
                yield row, example
            except Unusable as problem:
                yield row, Unusable(problem.kind, f"{file.name}: {problem}")


def _example(record: Mapping[str, Any], split: str | None, docs: Path) -> Example:
    name, docid, spans = _parts(record)
    label, query = record.get("classification"), record.get("query") or ""
    if not isinstance(label, str | int | float | None) or not isinstance(query, str):
        raise Unusable("not ERASER's format", "its classification is not a label, or its query is not a text")
    file = docs / docid
    if not file.resolve().is_relative_to(docs.resolve()) or not file.is_file():
        raise Unusable("no document", f"its document {docid!r} is not in {str(docs)!r}")
    with file.open(encoding="utf-8", errors="surrogateescape", newline="") as opened:
        document = opened.read()
    if UNDECODED.search(f"{document}{query}{name}{label}"):
        raise Unusable(
            "not in the encoding", f"its document {docid!r}, query, id or label holds what is no text in UTF-8"
        )
    if not document.split():
        raise Unusable("missing or empty", f"its document {docid!r} is empty")
    mask = None if spans is None else to_mask(spans, len(document.split())) + (False,) * len(query.split())
    return Example((document, query) if query.split() else document, label, mask, split, name)


def _parts(record: Mapping[str, Any]) -> tuple[str, str, list[tuple[int, int]] | None]:
    """The name of an annotation, that of its only document, and the spans of evidence; None if nobody was asked."""
    try:
        name = str(record["annotation_id"])
        evidences = [one for group in record.get("evidences") or () for one in group]
        spans = [(one["start_token"], one["end_token"]) for one in evidences]
        docids = {str(one["docid"]) for one in evidences} | {str(one) for one in record.get("docids") or ()}
    except (TypeError, KeyError) as problem:
        raise Unusable(
            "not ERASER's format",
            f"has no annotation_id, or evidence without docid, start_token and end_token: {problem}",
        ) from None
    if len(docids) > 1:
        raise Unusable("several documents", f"has {len(docids)} documents ({', '.join(sorted(docids))}), not one")
    return name, docids.pop() if docids else name, None if record.get("evidences") is None else spans


def _documents(gold: Path) -> dict[str, str]:
    """The document of each annotation; what cannot be read from here is no example of a dataset either."""
    named = {}
    for record in (record for file in _files(gold).values() for record in read_json(file)):
        with suppress(Unusable):
            if isinstance(record, Mapping):
                name, docid, _ = _parts(record)
                named[name] = docid
    return named


def _annotation(example: Example) -> dict[str, Any]:
    """A row of ERASER's JSONL."""
    words = _document(example).split()
    mask = example.rationale
    if mask is not None and any(mask[len(words) :]):
        raise InputError(f"the rationale of {example.id!r} has words of the query, which ERASER's format cannot hold.")
    evidences = [
        [{"docid": example.id, "start_token": start, "end_token": end, "text": " ".join(words[start:end])}]
        for start, end in spans_of(mask or ())
    ]
    return {
        "annotation_id": example.id,
        "classification": example.label,
        "docids": [example.id],
        "evidences": None if mask is None else evidences,
        "query": example.input[1] if isinstance(example.input, tuple) else "",
        "query_type": None,
    }


def _found(example: Example, scores: Sequence[float], share: float) -> dict[str, Any]:
    """Scores of the document's words, and its highest ones as spans."""
    numbers = np.asarray(scores, dtype=float)
    if numbers.shape != (len(example.words),) or not np.isfinite(numbers).all():
        raise InputError(
            f"scores of {example.id!r} have shape {numbers.shape} for {len(example.words)} words, or hold NaN or Inf. "
            "Pass one finite number for each word."
        )
    numbers = numbers[: len(_document(example).split())]
    count = max(1, round(share * len(numbers)))
    mask = np.isin(np.arange(len(numbers)), np.argsort(-numbers, kind="stable")[:count])
    hard = [{"start_token": start, "end_token": end} for start, end in spans_of(mask)]
    return {"hard_rationale_predictions": hard, "soft_rationale_predictions": numbers.tolist()}


def _mean_share(examples: Sequence[Example]) -> float:
    """How much of a document the human rationales are, on average."""
    marked = [one for one in examples if one.rationale is not None]
    shares = [sum(one.rationale or ()) / len(_document(one).split()) for one in marked]
    if not any(shares):
        raise OptionError("share=None takes the mean share of the human rationales, and there are none. Give a share.")
    return float(np.mean(shares))


def _document(example: Example) -> str:
    if isinstance(example.input, Mapping):
        raise InputError("dataset holds rows of a table, and ERASER's format holds texts. Use dataset.frame().")
    return example.input if isinstance(example.input, str) else example.input[0]


def _file_name(name: str) -> str:
    if name in ("", "..") or Path(name).name != name:
        raise InputError(f"id or split {name!r} cannot name a file. Give each example an id, and none with slashes.")
    return name
