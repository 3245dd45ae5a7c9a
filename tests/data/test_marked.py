"""Files in which people marked something: what is read, and what is said of those that do not parse."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from regard.data import Word, read
from regard.errors import InputError, OptionError

SHARED = Path("/work/shared/data")
CONLLU = """# sent_id = one
# text = I don't go aux bains.
1	I	I	PRON	_	_	4	nsubj	_	_
2-3	don't	_	_	_	_	_	_	_	_
2	do	do	AUX	_	_	4	aux	_	_
3	n't	not	PART	_	_	4	advmod	_	_
4	go	go	VERB	_	_	0	root	_	_
4.1	gone	go	VERB	_	_	_	_	_	_
5-6	aux	_	_	_	_	_	_	_	_
5	à	à	ADP	_	_	7	case	_	_
6	les	le	DET	_	_	7	det	_	_
7	bains	bain	NOUN	_	_	4	obl:arg	_	SpaceAfter=No
8	.	.	PUNCT	_	_	4	punct	_	_

1	So	so	ADV	_	_	0	root	_	SpaceAfter=No
2	!	!	PUNCT	_	_	1	punct	_	_
"""
HEADER = "ID\tText\tPronoun\tPronoun-offset\tA\tA-offset\tA-coref\tB\tB-offset\tB-coref\tURL\n"


def test_words_of_conllu(tmp_path):
    path = tmp_path / "x.conllu"
    path.write_text(CONLLU, "utf-8")
    first, second = read(path)
    assert (first.id, first.input, second.id, second.input) == ("one", "I don't go aux bains.", "2", "So!")
    words = first.marks["words"]
    assert words[0] == Word("I", 0, 1, "PRON", 3, "nsubj")
    assert [first.input[one.start : one.end] for one in words] == ["I", "do", "n't", "go", "aux", "aux", "bains", "."]
    assert [one.head for one in words] == [3, 3, 3, -1, 6, 6, 3, 3]
    assert words[6].relation == "obl:arg"
    assert [(one.start, one.end) for one in second.marks["words"]] == [(0, 2), (2, 3)]


def test_compressed_and_streamed_anew(tmp_path):
    path = tmp_path / "x.conllu.gz"
    path.write_bytes(gzip.compress(CONLLU.encode()))
    found = read(path)
    assert len(found) == 2
    assert list(found) == list(found)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("\t4\tnsubj\t_\t_", "\t4\tnsubj\t_", "line 3: has 9 columns"),
        ("\t4\tnsubj", "\t9\tnsubj", "line 3: has the head '9'"),
        ("\t4\tnsubj", "\t_\tnsubj", "line 3: has the head '_'"),
        ("\t4\tnsubj", "\t1\tnsubj", "line 3: word 1 is its own head"),
        ("7\tbains", "9\tbains", "line 12: has the number '9'; word 7 is next"),
        ("\tbains\tbain", "\tplages\tbain", "line 12: 'plages' is not what the text says next"),
    ],
)
def test_what_does_not_parse_is_named_by_its_line(tmp_path, old, new, said):
    path = tmp_path / "x.conllu"
    path.write_text(CONLLU.replace(old, new), "utf-8")
    with pytest.raises(InputError, match=said) as problem:
        read(path)
    assert "x.conllu" in str(problem.value)
    found = read(path, on_bad="skip")
    assert len(found) == 1
    assert len(found.skipped) == 1


def test_columns_cannot_be_named_where_there_are_none(tmp_path):
    path = tmp_path / "x.conllu"
    path.write_text(CONLLU, "utf-8")
    with pytest.raises(OptionError, match="text='form'"):
        read(path, text="form")


def test_gap(tmp_path):
    path = tmp_path / "gap.tsv"
    text = '"Ann met Bea before she left.'
    rows = [f"{n}\t{text}\tshe\t20\tAnn\t1\t{a}\tBea\t9\t{b}\thttp\n" for n, a, b in
            (("x", "TRUE", "FALSE"), ("y", "FALSE", "TRUE"), ("z", "FALSE", "FALSE"))]  # fmt: skip
    path.write_text(HEADER + "".join(rows), "utf-8")
    found = list(read(path))
    assert [one.label for one in found] == ["A", "B", "neither"]
    spans = found[0].marks["mentions"]
    assert {name: text[start:end] for name, (start, end) in spans.items()} == {"pronoun": "she", "A": "Ann", "B": "Bea"}
    path.write_text(HEADER + rows[0].replace("\t20\t", "\t21\t"), "utf-8")
    with pytest.raises(InputError, match="row 1: Pronoun='she' is not in 'Text' at Pronoun-offset='21'"):
        read(path)


def test_facts(tmp_path):
    path = tmp_path / "facts.json"
    path.write_text(json.dumps([
        {"prompt": "The mother tongue of Ann Lee is", "subject": "Ann Lee", "attribute": "French"},
        {"prompt": "{} is in", "subject": "is land", "answer": "Asia"},
    ]))  # fmt: skip
    first, second = read(path)
    assert first.marks["facts"] == {"subject": (21, 28), "answer": "French"}
    assert (second.input, second.marks["facts"]) == ("is land is in", {"subject": (0, 7), "answer": "Asia"})
    path.write_text(json.dumps([{"prompt": "a b", "subject": "c", "answer": "d"}, {"prompt": "a", "subject": "a"}]))
    with pytest.raises(InputError, match="row 1: the subject 'c' does not occur") as problem:
        read(path)
    assert "row 2: 'answer' is missing" in str(problem.value)


def test_relations_of_lre(tmp_path):
    path = tmp_path / "relation.json"
    samples = [{"subject": "big", "object": "bigger"}, {"subject": "in", "object": "inner"}]
    path.write_text(json.dumps({"prompt_templates_zs": ["The form in {} is"], "samples": samples}))
    found = [(one.input, one.marks["facts"]) for one in read(path)]
    assert found[0] == ("The form in big is", {"subject": (12, 15), "answer": "bigger"})
    assert found[1][1]["subject"] == (12, 14)  # where the template says, not where it occurs first


def test_json_that_holds_no_facts(tmp_path):
    path = tmp_path / "x.json"
    for text, said in (("{", "does not parse as JSON"), ('{"a": 1}', "holds no facts")):
        path.write_text(text)
        with pytest.raises(InputError, match=said):
            read(path)


@pytest.mark.skipif(not SHARED.exists(), reason="data of this machine")
def test_all_of_a_treebank_and_of_gap():
    sentences = list(read(SHARED / "ud_ewt/en_ewt-ud-test.conllu"))
    assert (len(sentences), sum(len(one.marks["words"]) for one in sentences)) == (2077, 25094)
    assert len(read(SHARED / "gap/gap-validation.tsv")) == 454
