"""The record itself: frozen, words and policies, tables, and a file from which it comes back as it was."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
import transformers as hf
from oracles import TEXTS, bert, seeded, t5

import regard
from regard import errors
from regard.explanation import SCHEMA, Explanation
from regard.types import Features

TOKENS = Features(
    tokens=("[CLS]", "un", "##believ", "##able", "so", "so", "[SEP]"),
    rows=(0, 1, 2, 3, 4, 5, 6),
    words=("unbelievable", "so", "so"),
    word=(None, 0, 0, 0, 1, 2, None),
)
SCORES = [4.0, 1.0, -3.0, 2.0, 5.0, 6.0, 3.0]


def made(scores=SCORES, features=TOKENS, **options) -> Explanation:
    known = {
        "scores": np.array(scores), "axes": ("token",), "features": features, "parts": {"input": len(features.tokens)},
        "queries": None, "method": "raw", "options": {"layer": "last"}, "target": "good", "value": 1.5,
        "probability": 0.75, "of": "logit", "special": "keep", "sink": "keep", "check": {"error": 1e-9},
        "facts": {}, "model": {"class": "Some", "name": ""}, "versions": {"regard": "0"},
    }  # fmt: skip
    return Explanation(**known | options)


def words_of(why, reduce="sum"):
    table = why.words(reduce)
    return list(zip(table["word"], table["special"], table["score"], strict=True))


@pytest.fixture(scope="module")
def subject(tokenizer):
    return regard.text(bert(tokenizer), tokenizer)


# --- frozen ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(Explanation)])
def test_it_is_frozen(subject, field):
    why = regard.explain(subject, TEXTS[0], method="raw")
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(why, field, None)


def test_the_number_explained_and_its_probability(subject):
    for of in ("logit", "probability", "logprob"):
        why = regard.explain(subject, TEXTS[0], method="raw", target=1, of=of)
        logits = regard.trace(subject, TEXTS[0]).output[0]
        columns = {"logit": logits, "probability": logits.softmax(-1), "logprob": logits.log_softmax(-1)}
        assert why.value == pytest.approx(float(columns[of][1]), abs=1e-12)
        assert why.probability == pytest.approx(float(logits.softmax(-1)[1]), abs=1e-12)
        assert (why.target, why.of, why.method) == ("LABEL_1", of, "raw")
    assert why.options["heads"] == "mean", "defaults are on record"
    assert why.check["readout"] == "measured"
    assert 0 <= why.check["error"] < 1e-12
    assert {"regard", "torch", "transformers"} <= set(why.versions)


# --- words ----------------------------------------------------------------------------------------------------------


def test_tokens_are_joined_to_words():
    why = made()
    rest = [("so", False, 5.0), ("so", False, 6.0), ("[SEP]", True, 3.0)]
    assert words_of(why) == [("[CLS]", True, 4.0), ("unbelievable", False, 0.0), *rest]
    assert words_of(why, "mean") == [("[CLS]", True, 4.0), ("unbelievable", False, 0.0), *rest]
    assert words_of(why, "max") == [("[CLS]", True, 4.0), ("unbelievable", False, -3.0), *rest], (
        "by size, with its sign"
    )
    assert words_of(made([0.0, 1.0, 2.0, 6.0, 0, 0, 0]), "mean")[1] == ("unbelievable", False, 3.0)
    assert why.words()["position"].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(errors.OptionError, match="reduce='median' is not known"):
        why.words("median")


def test_words_that_occur_twice_are_two_words(subject):
    why = regard.explain(subject, "so so dull so", method="raw", special="drop")
    assert why.words()["word"].tolist() == ["so", "so", "dull", "so"]
    assert why.words()["score"].tolist() == why.scores[1:-1].tolist()
    assert why.frame()["position"].tolist() == list(range(6))


def test_words_of_two_sequences_are_kept_apart(tokenizer):
    subject = regard.seq2seq(t5(tokenizer), tokenizer)
    why = regard.explain(subject, ("so so", "so dull"), method="rollout", special="drop")
    assert why.words()["word"].tolist() == ["so", "so", "so", "dull"]
    table = why.frame()
    assert table["part"].tolist() == ["source"] * why.parts["source"] + ["produced"] * why.parts["produced"]
    assert table["score"].tolist() == why.scores.tolist()


def test_special_tokens_are_kept_dropped_or_given_to_the_others():
    middle = [("unbelievable", False, 0.0), ("so", False, 5.0), ("so", False, 6.0)]
    assert words_of(made(special="keep")) == [("[CLS]", True, 4.0), *middle, ("[SEP]", True, 3.0)]
    assert words_of(made(special="drop")) == middle
    given = words_of(made(special="renormalise"))
    assert [name for name, _, _ in given] == ["unbelievable", "so", "so"]
    sizes = [abs(score) for score in SCORES]  # signs cancel, so it is the sum of sizes that stays
    more = sum(sizes) / sum(sizes[1:-1])
    assert [score for _, _, score in given] == pytest.approx([0, 5 * more, 6 * more], abs=1e-12)
    assert made(special="drop").scores.tolist() == SCORES, "scores themselves stay raw"


def test_the_policy_is_the_subjects_unless_it_is_given(tokenizer, subject):
    dropping = regard.text(subject.model, tokenizer, special="drop")
    assert regard.explain(dropping, TEXTS[0], method="raw").special == "drop"
    why = regard.explain(dropping, TEXTS[0], method="raw", special="renormalise")
    assert why.special == "renormalise"
    assert "special tokens: renormalise" in why.caption
    assert why.words()["score"].sum() == pytest.approx(1)
    assert len(why.scores) == len(why.words()) + 2
    for policy in ("special", "sink"):
        with pytest.raises(errors.OptionError, match=f"{policy}='hide' is not known"):
            regard.explain(subject, TEXTS[0], method="raw", **{policy: "hide"})


DECODER = Features(tokens=("un", "believable", " so", "</s>"), rows=(0, 1, 2, 3), words=("unbelievable", "so"), word=(0, 0, 1, None))  # fmt: skip


@pytest.mark.parametrize(
    ("special", "sink", "expected"),
    [
        ("keep", "keep", [("unbelievable", 9.0), ("so", 2.0), ("</s>", 1.0)]),
        ("keep", "drop", [("unbelievable", 3.0), ("so", 2.0), ("</s>", 1.0)]),  # what is left of a word is shown
        ("keep", "renormalise", [("unbelievable", 6.0), ("so", 4.0), ("</s>", 2.0)]),
        ("drop", "drop", [("unbelievable", 3.0), ("so", 2.0)]),
        ("renormalise", "renormalise", [("unbelievable", 3 * 12 / 5), ("so", 2 * 12 / 5)]),
        ("drop", "renormalise", [("unbelievable", 3 * 11 / 5), ("so", 2 * 11 / 5)]),
        ("renormalise", "drop", [("unbelievable", 3 * 12 / 11), ("so", 2 * 12 / 11)]),
    ],
)
def test_the_first_token_has_a_policy_of_its_own(special, sink, expected):
    why = made([6.0, 3.0, 2.0, 1.0], DECODER, special=special, sink=sink)
    found = why.words()
    assert found["word"].tolist() == [name for name, _ in expected]
    assert found["score"].tolist() == pytest.approx([score for _, score in expected])
    assert why.first_share == pytest.approx(0.5)
    assert bool(re.search(f"first token[^;]*: {sink}", why.caption)) == (sink != "keep")


def test_where_nothing_is_left_to_give_to_nothing_is_divided():
    why = made([1.0, 0, 0, 0, 0, 0, 2.0], special="renormalise")
    assert [score for _, _, score in words_of(why)] == [0, 0, 0]


def test_scores_of_several_layers_have_no_words(subject):
    why = regard.explain(subject, TEXTS[0], method="raw", per_layer=True)
    with pytest.raises(errors.OptionError, match="axes .*'layer', 'token'.*not one for each word"):
        why.words()
    table = why.frame()
    assert list(table.columns) == ["layer", "position", "token", "word", "special", "score"]
    for line in table.itertuples():
        assert line.score == why.scores[line.layer, line.position]
        assert line.token == why.features.tokens[line.position]


# --- files ----------------------------------------------------------------------------------------------------------


def assert_comes_back(why, folder):
    again = regard.load_explanation(why.save(folder / "deeper" / "why.json"))
    assert again == why
    assert again.scores.dtype == why.scores.dtype
    assert again.scores.tobytes() == why.scores.tobytes(), "bit for bit"
    for field in dataclasses.fields(Explanation):
        if field.name not in ("scores", "facts", "picture"):
            assert getattr(again, field.name) == getattr(why, field.name), field.name
    assert (again.picture is None) == (why.picture is None)
    assert again.picture is None or np.array_equal(again.picture, why.picture)
    for name, fact in why.facts.items():
        assert np.asarray(again.facts[name]).dtype == np.asarray(fact).dtype, name
        assert np.array_equal(again.facts[name], fact)
    return again


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("raw", {}),
        ("raw", {"per_layer": True}),
        ("raw", {"per_layer": True, "per_head": True, "matrix": True}),
        ("rollout", {"alpha": 1 / 3}),
        ("grad_rollout", {"target": (2, 0)}),
        ("random", {"seed": 11}),
        ("effective", {}),
        ("integrated", {"steps": 3, "of": "logprob", "sink": "drop", "special": "renormalise"}),
    ],
)
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_it_comes_back_as_it_was(tokenizer, tmp_path, method, options, precision):
    model = getattr(bert(tokenizer), "float" if precision == "float32" else "double")()
    why = regard.explain(regard.text(model, tokenizer), TEXTS[1], method=method, **options)
    again = assert_comes_back(why, tmp_path)
    assert again.caption == why.caption
    if why.scores.ndim < 4:  # there is a picture
        assert again.plot()._repr_html_() == why.plot()._repr_html_()


def test_numbers_that_are_hard_to_write_come_back(tmp_path):
    hard = [0.1, -0.0, 5e-324, 1.7976931348623157e308, 1 / 3, -1e-17, float("nan")]
    for dtype in (np.float64, np.float32):
        with np.errstate(over="ignore", under="ignore"):
            scores = np.array(hard, dtype=dtype)
        if dtype is np.float32:
            scores[3] = np.finfo(np.float32).max
        why = made(scores)
        again = regard.load_explanation(why.save(tmp_path / "why.json"))
        assert again.scores.dtype == dtype
        assert np.array_equal(again.scores, scores, equal_nan=True)
        assert np.signbit(again.scores[1])
        assert again == why


def test_two_that_differ_are_not_equal():
    why = made()
    assert why == made()
    assert why != made([*SCORES[:-1], np.nextafter(3.0, 4.0)])
    assert why != made(np.array(SCORES, dtype=np.float32)), "another precision is another record"
    assert why != made(options={"layer": 0})
    assert why != "why"


def test_whole_numbers_of_numpy_are_options_like_any(subject, tmp_path):
    assert_comes_back(regard.explain(subject, TEXTS[0], method="raw", heads=np.int64(1)), tmp_path)


def test_a_picture_comes_back(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = seeded(lambda: hf.ViTForImageClassification(hf.ViTConfig(**sizes, patch_size=8, image_size=(24, 32))))
    processor = hf.ViTImageProcessorPil(size={"height": 24, "width": 32})
    photo = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    why = regard.explain(regard.image(model.float(), processor), photo, method="rollout")
    assert np.array_equal(why.picture, photo), "as the model sees it: nothing was to be resized"
    assert why.features.grid == (3, 4)
    again = assert_comes_back(why, tmp_path)
    assert again.features == why.features
    assert len(again.words()) == 13
    assert again.plot()._repr_html_() == why.plot()._repr_html_()


def test_another_schema_is_refused(tmp_path):
    file = made().save(tmp_path / "why.json")
    plain = json.loads(file.read_text())
    file.write_text(json.dumps(plain | {"schema": SCHEMA + 1}))
    with pytest.raises(errors.InputError, match=f"has schema {SCHEMA + 1}; .* reads schema {SCHEMA}"):
        regard.load_explanation(file)


@pytest.mark.parametrize(
    "content",
    ["", "no json", "[1, 2]", "7", "null", '{"scores": [1]}', "\udcff", f'{{"schema": {SCHEMA}}}',
     f'{{"schema": {SCHEMA}, "dtype": "float32", "features": {{}}, "scores": [1]}}'],
)  # fmt: skip
def test_what_is_no_explanation_is_refused(tmp_path, content):
    file = tmp_path / "why.json"
    file.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(errors.InputError, match="why.json.* is not an explanation that regard has saved"):
        regard.load_explanation(file)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(errors.InputError, match="nowhere.json.* is not there"):
        regard.load_explanation(tmp_path / "nowhere.json")


# --- means ----------------------------------------------------------------------------------------------------------


def test_the_mean_of_examples_with_the_same_tokens():
    mean = Explanation.mean([made(), made([0.0] * 7), made([2.0] * 7)])
    assert mean.scores.tolist() == pytest.approx([(score + 2) / 3 for score in SCORES])
    assert "mean of 3" in mean.target
    assert mean.value is mean.probability is None
    for bad in ([], [made(), made([1.0] * 4, DECODER)]):
        with pytest.raises(errors.InputError, match="same tokens"):
            Explanation.mean(bad)


def test_policies_that_leave_no_word_are_refused():
    one = Features(("so",), (0,), ("so",), (0,))
    with pytest.raises(errors.OptionError, match="special='drop' and sink='drop' leave no word"):
        made([1.0], one, special="drop", sink="drop").words()
