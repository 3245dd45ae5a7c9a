"""What heads look at, against loops over the weights that the models' own code gives, in float64.

The oracles read Hugging Face's eager attentions of each text alone, and count keys by hand. The hand-made heads look
where they are told to: each probe must be 1 for its own head, and for no other.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import regard
from regard import errors
from regard.data import Dataset, Example

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "methods")]
from handmade import handmade  # noqa: E402
from oracles import bert, classified, continued, llama, produced, t5  # noqa: E402

TEXTS = ["a moving film, and dull .", "so so", "dull, and it never ends: an unbelievably overlong film !"]
PAIRS = [("a moving film.", "so it is"), ("so", "dull, dull"), ("dull, it ends !", "it is")]
LOOKS = ["entropy", "confidence", "distance", "first", "special", "punctuation", "own", "previous", "following"]


def literal(weights, tokens, special, one_sequence=True):
    """All looks at one site of one text, ``(head, query, key)``: by name a number for each head, by loops."""
    signs = [not odd and not any(map(str.isalnum, token)) for token, odd in zip(tokens, special, strict=True)]
    found = {name: [] for name in LOOKS}
    for head in weights.numpy():
        rows = {name: [] for name in LOOKS}
        for query, row in enumerate(head):
            rows["entropy"].append(-sum(a * np.log(a) for a in row if a > 0))
            rows["confidence"].append(max(row))
            rows["first"].append(row[0])
            rows["special"].append(sum(a for a, odd in zip(row, special, strict=True) if odd))
            rows["punctuation"].append(sum(a for a, sign in zip(row, signs, strict=True) if sign))
            if not one_sequence:
                continue
            rows["distance"].append(sum(a * abs(query - key) for key, a in enumerate(row)))
            rows["own"].append(row[query])
            if query > 0:
                rows["previous"].append(row[query - 1])
            if query + 1 < len(row):
                rows["following"].append(row[query + 1])
        for name, numbers in rows.items():
            found[name].append(np.mean(numbers) if numbers else np.nan)
    return found


def expected(sites):
    """Means over texts of `literal`; sites of each text as (weights, tokens, special, one sequence)."""
    texts = [[literal(*site) for site in text] for text in sites]
    return {
        name: np.mean([[number for site in text for number in site[name]] for text in texts], axis=0) for name in LOOKS
    }


def tokens_of(tokenizer, ids):
    return [tokenizer.decode([one]) for one in ids], [one in tokenizer.all_special_ids for one in ids]


def must_agree(table, wanted):
    for name in LOOKS:
        assert np.isfinite(wanted[name]).any()
        np.testing.assert_allclose(table[name].values["value"], wanted[name], rtol=0, atol=1e-6, err_msg=name)


# --- against the models' own weights --------------------------------------------------------------------------------


def test_looks_of_an_encoder(tokenizer):
    model = bert(tokenizer)
    sites = []
    for text in TEXTS:
        seen = tokens_of(tokenizer, tokenizer(text)["input_ids"])
        sites.append([(one, *seen) for one in classified(model, tokenizer, text).weights])
    must_agree(regard.heads(regard.text(model, tokenizer), TEXTS, probes=LOOKS, draws=5), expected(sites))


@pytest.mark.parametrize("side", ["left", "right"])
def test_looks_of_a_decoder(tokenizer, side):
    model = llama(tokenizer)
    sites = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        weights = continued(model, tokenizer, text).weights
        sites.append([(one, *tokens_of(tokenizer, ids)) for one in weights])
    subject = regard.causal(model, tokenizer, padding_side=side)
    table = regard.heads(subject, TEXTS, probes=LOOKS, draws=5)
    must_agree(table, expected(sites))
    assert (table["following"].values["value"] == 0).all(), "a decoder does not look ahead"


def test_looks_of_an_encoder_decoder(tokenizer):
    """Between the two sequences there are no distances; special tokens and punctuation are those of the keys."""
    model = t5(tokenizer)
    sites = []
    for source, text in PAIRS:
        run, kinds = produced(model, tokenizer, source, text)
        said = [model.config.decoder_start_token_id, *tokenizer(text)["input_ids"][:-1]]
        read = {"source": tokenizer(source)["input_ids"], "rows": said}
        keys = [tokens_of(tokenizer, read[kind.split()[1]]) for kind in kinds]
        sites.append([
            (one, *seen, kind.split()[0] == kind.split()[1])
            for one, seen, kind in zip(run.weights, keys, kinds, strict=True)
        ])  # fmt: skip
    pairs = Dataset.of([Example(pair) for pair in PAIRS])  # a list of tuples would be texts with labels
    table = regard.heads(regard.seq2seq(model, tokenizer), pairs, probes=LOOKS, draws=5)
    wanted = expected(sites)
    must_agree(table, wanted)
    across = (table.index["kind"] == "cross").to_numpy()
    for name in ("distance", "own", "previous", "following"):
        values = table[name].values["value"].to_numpy()
        assert np.array_equal(np.isnan(values), across), "not defined between two sequences, and only there"


# --- heads that look where they are told to -------------------------------------------------------------------------

RULES = {
    "own": lambda q, k, n: q == k,
    "previous": lambda q, k, n: k == (q - 1).clamp_min(0),
    "following": lambda q, k, n: k == (q + 1).clamp_max(n - 1),
    "first": lambda q, k, n: k == 0 * q,
    "[SEP]": lambda q, k, n: k == n - 1 + 0 * q,
    "comma": lambda q, k, n: k == 3 + 0 * q,
    "all": lambda q, k, n: k == k + 0 * q,
    "words": lambda q, k, n: (k == 1) | (k == 6) | (q < 0),
}
SAID = ["a film , that never ends at all", "one more , and then it is over", "no word , of it is true"]


def test_each_look_finds_the_head_that_was_made_for_it_and_no_other(tokenizer):
    subject = handmade(tokenizer, [*RULES.values()])
    assert {subject.encode(text).features[0].tokens[3] for text in SAID} == {","}
    table = regard.heads(subject, SAID, probes=LOOKS, batch_size=1, draws=5)
    lengths = np.array([subject.encode(text).real.shape[1] for text in SAID])

    def values(name):
        return dict(zip(RULES, table[name].values["value"], strict=True))

    for name, those in {
        "own": {"own"}, "previous": {"previous"}, "following": {"following"}, "first": {"first"},
        "special": {"first", "[SEP]"}, "punctuation": {"comma"},
    }.items():  # fmt: skip
        for head, value in values(name).items():
            assert value == pytest.approx(1, abs=1e-9) if head in those else value < 0.4, (name, head)
    assert values("special")["comma"] == pytest.approx(0, abs=1e-9)
    assert values("special")["all"] == pytest.approx((2 / lengths).mean())
    assert values("entropy")["own"] == pytest.approx(0, abs=1e-9)
    assert values("entropy")["all"] == pytest.approx(np.log(lengths).mean())
    assert values("entropy")["words"] == pytest.approx(np.log(2))
    assert values("confidence")["words"] == pytest.approx(0.5)
    assert values("confidence")["all"] == pytest.approx((1 / lengths).mean())
    assert values("distance")["own"] == pytest.approx(0, abs=1e-9)
    assert values("distance")["previous"] == pytest.approx(((lengths - 1) / lengths).mean())
    assert values("distance")["first"] == pytest.approx(((lengths - 1) / 2).mean())


def test_pieces_of_letters_are_no_punctuation(tokenizer):
    """What a byte-level tokenizer makes of 東 are bytes, which decode to U+FFFD."""

    class Bytes:
        """The subject, but that one of its tokens is such a piece."""

        def __init__(self, subject):
            self.subject = subject

        def __getattr__(self, name):
            return getattr(self.subject, name)

        def encode(self, inputs):
            batch = self.subject.encode(inputs)
            (one,) = batch.features
            tokens = tuple("\ufffd" if token == "film" else token for token in one.tokens)
            return type(batch)(batch.inputs, batch.real, (type(one)(tokens, one.rows, one.words, one.word),))

    subject = handmade(tokenizer, [lambda q, k, n: k == 2 + 0 * q, lambda q, k, n: k == 3 + 0 * q])
    table = regard.heads(Bytes(subject), ["a film , it is"], probes="punctuation", batch_size=1, draws=2)
    np.testing.assert_allclose(table["punctuation"].values["value"], [0, 1], atol=1e-9)


# --- rare words -----------------------------------------------------------------------------------------------------


def literally_rare(weights, features, counts):
    """Of one site of one text ``(head, query, key)``: share of rows and chance, for each head."""
    words = [None if word is None else features.words[word].casefold() for word in features.word]
    found = []
    for head in weights.numpy():
        hits, chances = [], []
        for row in head:
            seen = [key for key, weight in enumerate(row) if weight > 0 and words[key] is not None]
            if not seen:
                continue
            least = min(counts.get(words[key], 0) for key in seen)
            rarest = [key for key in seen if counts.get(words[key], 0) == least]
            hits.append(max(seen, key=lambda key: row[key]) in rarest)
            chances.append(len(rarest) / len(seen))
        found.append((np.mean(hits), np.mean(chances)))
    return found


@pytest.mark.parametrize("given", [None, {"A": 9, "film": 3, "so": 2, "and": 20, ",": 30, "overlong": 2}])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_rare_words_literally(tokenizer, kind, given):
    model = bert(tokenizer) if kind == "encoder" else llama(tokenizer)
    subject = regard.text(model, tokenizer) if kind == "encoder" else regard.causal(model, tokenizer)
    features = [subject.encode(text).features[0] for text in TEXTS]
    counts = {}
    for word in [word.casefold() for one in features for word in one.words]:
        counts[word] = counts.get(word, 0) + 1
    counts = counts if given is None else {word.casefold(): count for word, count in given.items()}
    run = classified if kind == "encoder" else continued
    wanted = np.mean([
        [pair for site in run(model, tokenizer, text).weights for pair in literally_rare(site, one, counts)]
        for text, one in zip(TEXTS, features, strict=True)
    ], axis=0)  # fmt: skip
    assert wanted[:, 0].std() > 0
    table = regard.heads(subject, TEXTS, probes=[("rare", {"counts": given})], draws=5)
    (found,) = table.probed.values()
    np.testing.assert_allclose(found.values["value"], wanted[:, 0], atol=1e-12)
    np.testing.assert_allclose(found.tables["chance"]["chance"], wanted[:, 1], atol=1e-7)


RARE = [f"the film the {word} the film the film" for word in ("zebra", "apple", "river", "tiger", "stone", "cloud")]


def test_the_head_that_looks_at_the_rarest_word_is_found_and_no_other(tokenizer, tmp_path):
    rules = [lambda q, k, n: k == 4 + 0 * q, lambda q, k, n: k == 1 + 0 * q, lambda q, k, n: k == q]
    subject = handmade(tokenizer, rules)
    found = regard.heads(subject, RARE, probes="rare", batch_size=1, draws=20)["rare"]
    assert found.values["label"].tolist() == ["rare words", "", ""]
    # [CLS] and [SEP] look at themselves; among words they then look at the first, all alike but for rounding
    np.testing.assert_allclose(found.values["value"][:2], [1, 0])
    assert found.values["value"][2] < 0.4
    np.testing.assert_allclose(found.tables["chance"]["chance"], 1 / 8)
    assert not found.warnings
    assert found.sentence == "1 of 3 heads look at the rarest word; by chance 12% of rows would."
    file = tmp_path / "counts.txt"
    file.write_text("The\t1\nfilm 900\n" + "".join(f"{text.split()[3]} 1000\n" for text in RARE), "utf-8")
    turned = regard.heads(subject, RARE, probes=[("rare", {"counts": file})], batch_size=1, draws=20)
    (other,) = turned.probed.values()
    assert other.values["label"].tolist()[:2] == ["", "rare words"], "counts decide what is rare"
    assert other.settings["counts"] == str(file)


def test_where_most_words_are_equally_rare_it_says_so(tokenizer):
    subject = regard.text(bert(tokenizer), tokenizer)
    found = regard.heads(subject, ["a moving film", "so it is"], probes="rare", draws=5)["rare"]
    assert (found.tables["chance"]["chance"] == 1).all()
    assert (found.values["value"] == 1).all()
    assert (found.values["label"] == "").all(), "what chance would do is no role"
    assert "pass counts= of a larger corpus" in found.warnings[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [("the 3\nfilm\n", r"line 2: 'film' is no word and its count"), ("the x", r"line 1: 'the x' is no word"),
     ("the 3\n\n", r"line 2: '' is no word"), (None, r"cannot be read"), ("le 3\nfilms 4", "holds none of the words")],
)  # fmt: skip
def test_counts_that_cannot_be_used(tokenizer, tmp_path, text, problem):
    file = tmp_path / "counts.txt"
    if text is not None:
        file.write_text(text, "utf-8")
    with pytest.raises(errors.InputError, match=problem):
        regard.heads(regard.text(bert(tokenizer), tokenizer), TEXTS, probes=[("rare", {"counts": str(file)})])
