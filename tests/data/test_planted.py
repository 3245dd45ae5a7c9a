"""Planted tasks against their rules, written out here a second time."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache

import numpy as np
import pytest
from scipy.stats import binomtest, chi2_contingency, mannwhitneyu

from regard import errors
from regard.data import words
from regard.data.planted import LABELS, TASKS, confirm, plant

TOOLS = {"hammer", "drill", "shovel", "wrench", "rake", "chisel", "spade", "axe"}
INSTRUMENTS = {"violin", "piano", "flute", "guitar", "trumpet", "cello", "harp", "drum"}
LIKED, DISLIKED = {"loved", "liked", "admired", "praised"}, {"hated", "disliked", "despised", "condemned"}
NEGATIONS = {"never", "hardly", "barely"}
WARM, COLD = {"red", "orange", "yellow", "pink"}, {"blue", "green", "violet", "turquoise"}
OTHER = {"positive": "negative", "negative": "positive"}

CAUSES = {
    "keyword": ("keyword",), "columns": ("columns",), "copies": ("copies",), "copied_columns": ("copies",),
    "shortcut": ("cause", "shortcut"), "position": ("first",), "xor": ("first", "second"),
    "two_facts": ("first", "second"), "negation": ("keyword", "negation"),
}  # fmt: skip
TABLES = ("columns", "copied_columns", "xor")
TEXTS = tuple(task for task in CAUSES if task not in TABLES)
SOME = [(task, seed) for task in CAUSES for seed in (0, 7)]


@cache
def drawn(task, seed=0):
    return plant(task, train=600, test=200, seed=seed)


@cache
def many(task):
    return plant(task, train=20_000, test=2)


def columns_of(found):
    """The columns that the rule names."""
    return re.findall(r"\b[a-h]\b", found.says)


def named(text):
    """The instruments and tools of a text, as they are read."""
    return [word for word in text.split() if word in TOOLS | INSTRUMENTS]


def same_temperature(text):
    first, second = (word in WARM for word in text.split() if word in WARM | COLD)
    return first == second


def liked(text):
    tokens = text.split()
    (place,) = (place for place, token in enumerate(tokens) if token in LIKED | DISLIKED)
    return (tokens[place] in LIKED) != (tokens[place - 1] in NEGATIONS)


def rule(found):
    """From an input of the task to its label."""
    cells = columns_of(found)
    positive = {
        "keyword": lambda text: bool(INSTRUMENTS & set(named(text))),
        "copies": lambda text: bool(INSTRUMENTS & set(named(text))),
        "position": lambda text: named(text)[0] in INSTRUMENTS,
        "shortcut": same_temperature,
        "two_facts": same_temperature,
        "negation": liked,
        "columns": lambda row: row[cells[0]] + row[cells[1]] > 0,
        "xor": lambda row: (row[cells[0]] > 0) != (row[cells[1]] > 0),
        "copied_columns": lambda row: next(row[cell] for cell in cells if row[cell]) > 0,
    }[found.task]
    return lambda value: "positive" if positive(value) else "negative"


def by_day(text):
    return "positive" if "friday" in text.split() else "negative"


def mask(found, cause, value):
    """What the cause is, in an input."""
    if found.task in TABLES:
        cells = columns_of(found)
        cells = {"first": cells[:1], "second": cells[1:]}.get(cause, cells)
        return tuple(column in cells and bool(number) for column, number in value.items())
    tokens = value.split()
    causal = {
        "keyword": TOOLS | INSTRUMENTS | LIKED | DISLIKED, "copies": TOOLS | INSTRUMENTS, "cause": WARM | COLD,
        "negation": NEGATIONS, "shortcut": {"monday", "friday"}, "first": TOOLS | INSTRUMENTS | WARM | COLD, "second": WARM | COLD,
    }[cause]  # fmt: skip
    places = [place for place, token in enumerate(tokens) if token in causal]
    places = {"first": places[:1], "second": places[1:]}.get(cause, places)
    return tuple(place in places for place in range(len(tokens)))


def meant(found, value):
    """All that decides the label."""
    masks = [mask(found, cause, value) for cause in CAUSES[found.task] if cause != "shortcut"]
    return tuple(map(any, zip(*masks, strict=True)))


def differing(one, other):
    """The places at which two inputs differ."""
    one, other = (value.split() if isinstance(value, str) else list(value.items()) for value in (one, other))
    assert len(one) == len(other)
    return [place for place, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]


def test_the_names_of_the_tasks():
    assert tuple(CAUSES) == TASKS


@pytest.mark.parametrize(("task", "seed"), SOME)
def test_the_rule_gives_each_label_and_the_mask_is_its_causes(task, seed):
    found = drawn(task, seed)
    decide = rule(found)
    assert (found.task, found.seed) == (task, seed)
    assert tuple(found.causes) == tuple(found.changed) == CAUSES[task]
    for data, size in ((found.train, 600), (found.test, 200), (found.held_out, 200)):
        assert len(data) == size
        assert data.labels == ("negative", "positive")
        assert Counter(example.label for example in data) == {"negative": size / 2, "positive": size / 2}
        for example in data:
            assert example.label == decide(example.input)
            assert example.rationale == meant(found, example.input)
    assert {example.split for example in found.train} == {"train"}
    assert {example.split for example in found.test} == {"test"}
    for cause, masks in found.causes.items():
        assert masks == tuple(mask(found, cause, value) for value in found.test.inputs())


@pytest.mark.parametrize(("task", "seed"), SOME)
def test_changing_a_cause_gives_the_other_label(task, seed):
    found = drawn(task, seed)
    for cause, changed in found.changed.items():
        decide = by_day if cause == "shortcut" else rule(found)
        for before, after, causal in zip(found.test, changed, found.causes[cause], strict=True):
            assert after.label == decide(after.input) == OTHER[decide(before.input)]
            places = differing(before.input, after.input)
            assert after.id == before.id
            if cause == "negation" and not any(causal):
                (place,) = places
                assert before.words[place] in words.PLAIN["adverb"]
                assert after.words[place] in NEGATIONS
                assert after.words[place + 1] in LIKED | DISLIKED
            elif cause == "cause":
                assert len(places) == 1
                assert causal[places[0]]
            else:
                assert places == [place for place, one in enumerate(causal) if one]
            if cause == "shortcut":
                assert rule(found)(after.input) == before.label
                assert after.rationale == causal
            else:
                assert after.rationale == meant(found, after.input)


@pytest.mark.parametrize(("task", "seed"), SOME)
def test_what_is_neutral_is_no_cause(task, seed):
    found = drawn(task, seed)
    exchanged = Counter()
    for number, (before, after) in enumerate(zip(found.test, found.neutral, strict=True)):
        (place,) = differing(before.input, after.input)
        assert not any(masks[number][place] for masks in found.causes.values())
        assert after.label == before.label == rule(found)(after.input)
        assert after.rationale == before.rationale
        exchanged[place] += 1
        if task in TEXTS:
            kinds = [kind for kind, known in words.PLAIN.items() if before.words[place] in known]
            assert all(after.words[place] in words.PLAIN[kind] for kind in kinds)
            assert bool(kinds) != (task == "position")
        if task == "position":
            assert {before.words[place] in TOOLS, after.words[place] in TOOLS} == {True, False}
    assert len(exchanged) >= 5


@pytest.mark.parametrize("task", ["copies", "copied_columns"])
def test_any_copy_suffices(task):
    found = drawn(task)
    assert list(found.kept) == ["copy 1", "copy 2", "copy 3"]
    for copy, kept in enumerate(found.kept.values()):
        for before, after in zip(found.test, kept, strict=True):
            places = [place for place, causal in enumerate(before.rationale) if causal]
            cells = list(before.input.values()) if task in TABLES else before.words
            assert len(places) == 3
            assert len({cells[place] for place in places}) == 1
            assert differing(before.input, after.input) == [places[copy]]
            assert after.label == before.label == rule(found)(after.input)
            assert [place for place, causal in enumerate(after.rationale) if causal] == places[:copy] + places[
                copy + 1 :
            ]


@pytest.mark.parametrize("task", [task for task in CAUSES if CAUSES[task] != ("copies",)])
def test_where_there_are_no_copies_none_is_taken(task):
    assert drawn(task).kept == {}


@pytest.mark.parametrize("task", CAUSES)
def test_train_and_test_share_nothing(task):
    found = plant(task, train=3000, test=500, seed=1)
    learned, tested, held = (set(map(str, data.inputs())) for data in (found.train, found.test, found.held_out))
    assert not learned & tested
    assert not learned & held
    assert bool(held & tested) == (task != "shortcut")


@pytest.mark.parametrize("task", ["keyword", "xor"])
def test_what_was_learned_is_drawn_anew(task, monkeypatch):
    """In a world of few sentences, where what was learned comes up again and again."""
    monkeypatch.setitem(words.CLAUSES, "keyword", (("the {keyword} {stayed}",),))
    monkeypatch.setattr("regard.data.planted.OPENINGS", ("",))
    monkeypatch.setattr("regard.data.planted._number", lambda rng: rng.choice([-1.0, 1.0]))
    for seed in range(20):
        found = plant(task, train=8, test=20, seed=seed)
        assert not {str(value) for value in found.train.inputs()} & {str(value) for value in found.test.inputs()}


@pytest.mark.parametrize("task", CAUSES)
def test_the_seed_decides(task):
    def inputs(seed):
        found = plant(task, train=50, test=20, seed=seed)
        parts = [found.train, found.held_out, found.test, found.neutral, *found.changed.values(), *found.kept.values()]
        return [list(part) for part in parts]

    assert inputs(3) == inputs(3)
    for one, other in zip(inputs(3), inputs(4), strict=True):
        assert not {str(example.input) for example in one} & {str(example.input) for example in other}


# --- what is no cause tells nothing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TEXTS)
def test_there_are_very_many_sentences(task):
    texts = many(task).train.inputs()
    assert len(set(texts)) >= 0.999 * len(texts)


@pytest.mark.parametrize("task", TEXTS)
def test_no_other_word_is_informative(task):
    found = many(task)
    outside, inside, lengths, starts = Counter(), Counter(), Counter(), Counter()
    for example in found.train:
        spared = mask(found, "shortcut", example.input)
        words_outside = {
            w for w, causal, day in zip(example.words, example.rationale, spared, strict=True) if not causal and not day
        }
        outside.update((word, example.label) for word in words_outside)
        inside.update((w, example.label) for w, causal in zip(example.words, example.rationale, strict=True) if causal)
        lengths[len(example.words), example.label] += 1
        starts[example.rationale.index(True), example.label] += 1

    def least(counts):
        """The smallest p value of a word's share of positive labels being a half, times the number of words and tasks."""
        seen = {word for word, _ in counts}
        known = [(counts[word, "positive"], counts[word, "negative"]) for word in seen]
        return len(TEXTS) * len(known) * min(binomtest(yes, yes + no).pvalue for yes, no in known)

    assert len(outside) > 200
    assert least(outside) > 0.01
    alone = task in ("keyword", "copies", "position")  # elsewhere a single word of the cause tells nothing, either
    assert (least(inside) < 1e-9) == alone
    for counts in (lengths, starts):
        table = [[counts[value, label] for label in OTHER] for value in {value for value, _ in counts}]
        table = [row for row in table if min(row) >= 5]
        assert len(table) >= 5, "lengths and places vary"
        assert chi2_contingency(table).pvalue > 0.01


@pytest.mark.parametrize("task", TABLES)
def test_no_other_column_is_informative(task):
    found = plant(task, train=5000, test=2)
    frame = found.train.frame()
    for column in "abcdefgh":
        one, other = (frame.loc[frame["label"] == label, column] for label in OTHER)
        tells = column in columns_of(found) and task != "xor"
        assert (mannwhitneyu(one, other).pvalue < 0.01 / 8) == tells
        assert (frame[column].abs() >= 0.25).all()
    if task == "columns":
        assert (frame[columns_of(found)].sum(axis=1).abs() >= 0.2499).all()  # MARGIN, but for the rounding of a sum


def test_the_columns_that_decide_are_drawn():
    assert len({tuple(columns_of(plant("xor", train=2, test=2, seed=seed))) for seed in range(20)}) > 8


def test_half_of_the_sentences_have_a_negation():
    found = many("negation")
    negated = [bool(NEGATIONS & set(example.words)) for example in found.train]
    assert binomtest(sum(negated), len(negated)).pvalue > 0.01
    assert all(sum(example.rationale) == 1 + one for example, one in zip(found.train, negated, strict=True))


def test_the_later_keyword_is_drawn_by_lot():
    alike = [len({word in TOOLS for word in named(text)}) == 1 for text in many("position").train.inputs()]
    assert binomtest(sum(alike), len(alike)).pvalue > 0.01


def test_the_shortcut_agrees_in_training_and_not_in_the_test():
    found = plant("shortcut", train=2000, test=400)
    for data, share in ((found.train, 0.99), (found.held_out, 0.99), (found.test, 0.5)):
        for label in OTHER:
            agrees = [by_day(example.input) == label for example in data if example.label == label]
            assert np.mean(agrees) == share
    assert {example.split for example in found.held_out} == {"held_out"}
    assert drawn("keyword").held_out is drawn("keyword").test


# --- text looks like text ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TEXTS)
def test_sentences(task):
    texts = many(task).train.inputs()
    for text in texts:
        tokens = text.split(" ")
        assert 8 <= len(tokens) <= 25
        assert all(re.fullmatch("[a-z]+|[.,]", token) for token in tokens)
        assert tokens[-1] == "."
    assert 200 < len({word for text in texts for word in text.split()}) < 500


def test_no_word_is_of_two_kinds():
    sides = [set(side) for kind, pair in words.SIDES.items() for side in pair if side is not words.PLAIN["adverb"]]
    kinds = [*map(set, words.PLAIN.values()), *sides]
    fixed = {
        w
        for task in words.CLAUSES.values()
        for patterns in task
        for pattern in patterns
        for w in pattern.split()
        if w[0] != "{"
    }
    kinds += [fixed | {"on", ",", "."}, set(words.JOINS)]
    assert sum(map(len, kinds)) == len(set().union(*kinds))
    for listed in words.PLAIN.values():
        assert len(set(listed)) == len(listed)


# --- confirm ----------------------------------------------------------------------------------------------------------


def each(function):
    return lambda inputs: [function(value) for value in inputs]


@pytest.mark.parametrize(("task", "seed"), SOME)
def test_who_follows_the_rule_is_confirmed(task, seed):
    found = drawn(task, seed)
    said = confirm(found, each(rule(found)))
    assert said.confirmed
    assert said.uses == (("cause",) if task == "shortcut" else CAUSES[task])
    assert said.accuracy == 1
    assert said.flips == {cause: float(cause != "shortcut") for cause in CAUSES[task]}
    assert said.neutral_flips == 0
    assert said.kept_flips == dict.fromkeys(found.kept, 0)
    assert said.truth == tuple(example.rationale for example in found.test)
    assert said.says == (
        f"Accuracy 100.0 %; it uses {' and '.join(said.uses)}; what should not matter flips 0.0 % of its decisions: "
        "it may serve as ground truth."
    )


@pytest.mark.parametrize("task", CAUSES)
def test_who_does_not_is_not_confirmed(task):
    found = drawn(task)
    nothing = tuple((False,) * len(example.words) for example in found.test)
    lots = np.random.default_rng(0)
    for predict in (
        lambda inputs: ["positive"] * len(inputs),
        lambda inputs: lots.choice(["positive", "negative"], len(inputs)),
    ):
        said = confirm(found, predict)
        assert not said.confirmed
        assert said.uses == ()
        assert said.truth == nothing
        assert "none of the causes" in said.says
        assert "may not serve" in said.says


@pytest.mark.parametrize("task", CAUSES)
def test_who_is_never_right_has_no_flips(task):
    found = drawn(task)
    said = confirm(found, each(lambda value: OTHER[rule(found)(value)]))
    assert (said.accuracy, said.neutral_flips, set(said.flips.values())) == (0, 0, {0})
    assert not said.confirmed


def test_who_takes_the_shortcut_is_confirmed_to_take_it():
    found = drawn("shortcut")
    said = confirm(found, each(by_day))
    assert said.confirmed
    assert said.uses == ("shortcut",)
    assert said.truth == found.causes["shortcut"]
    assert said.flips == {"cause": 0, "shortcut": 1}
    agrees = [by_day(example.input) == example.label for example in found.held_out]
    assert said.accuracy == np.mean(agrees) > 0.95


def test_who_ignores_negation_uses_the_keyword_only():
    found = drawn("negation")
    said = confirm(found, each(lambda text: "positive" if LIKED & set(text.split()) else "negative"))
    assert said.uses == ("keyword",)
    assert said.truth == found.causes["keyword"]
    assert not said.confirmed


def test_who_reads_one_copy_only_has_another_truth():
    found = drawn("copied_columns")
    last = columns_of(found)[-1]
    said = confirm(found, each(lambda row: "positive" if row[last] > 0 else "negative"))
    assert said.accuracy == said.flips["copies"] == 1
    assert said.kept_flips == {"copy 1": 0, "copy 2": 0, "copy 3": 0.5}  # to it, 0 is negative
    assert not said.confirmed


def test_shares_are_of_what_was_right():
    """A model with whims, counted by hand."""
    found = drawn("two_facts")

    def whim(text):
        return OTHER[rule(found)(text)] if "near" in text or "nurse" in text else rule(found)(text)

    said = confirm(found, each(whim))
    right = [example for example in found.test if whim(example.input) == example.label]
    assert 0 < len(right) < len(found.test)
    assert said.accuracy == len(right) / len(found.test)
    for shares, data in ((said.flips["first"], found.changed["first"]), (said.neutral_flips, found.neutral)):
        after = {example.id: whim(example.input) for example in data}
        assert shares == pytest.approx(sum(after[example.id] != example.label for example in right) / len(right))
    assert 0 < said.neutral_flips < 0.2


@pytest.mark.parametrize(("wrong", "confirmed"), [(10, True), (11, False)])
def test_95_percent_is_solved(wrong, confirmed):
    found = drawn("keyword")
    texts = set(found.test.inputs()[:wrong])
    said = confirm(found, each(lambda text: OTHER[rule(found)(text)] if text in texts else rule(found)(text)))
    assert said.accuracy == 1 - wrong / 200
    assert said.confirmed == confirmed


@pytest.mark.parametrize(("stubborn", "uses"), [(20, ("keyword",)), (21, ())])
def test_90_percent_of_flips_is_use(stubborn, uses):
    found = drawn("keyword")
    texts = set(found.changed["keyword"].inputs()[:stubborn])
    said = confirm(found, each(lambda text: OTHER[rule(found)(text)] if text in texts else rule(found)(text)))
    assert said.flips["keyword"] == pytest.approx(1 - stubborn / 200)
    assert said.uses == uses
    assert said.confirmed == bool(uses)


@pytest.mark.parametrize("part", ["neutral", "copy 2"])
@pytest.mark.parametrize(("moved", "confirmed"), [(10, True), (11, False)])
def test_5_percent_of_other_flips_are_allowed(part, moved, confirmed):
    found = drawn("copies")
    texts = set((found.neutral if part == "neutral" else found.kept[part]).inputs()[:moved])
    said = confirm(found, each(lambda text: OTHER[rule(found)(text)] if text in texts else rule(found)(text)))
    assert {"neutral": said.neutral_flips, **said.kept_flips}[part] == moved / 200
    assert said.confirmed == confirmed


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "options", "said"),
    [
        ("keywords", {}, "task='keywords' is not known. Choose one of 'keyword', 'columns', .*'negation'"),
        (None, {}, "task=None is not known"),
        ("xor", {"train": 1}, "train=1 must be one whole number, 2 or more"),
        ("xor", {"train": [5, 6]}, r"train=\[5, 6\] must be one whole number"),
        ("xor", {"test": 0}, "test=0 must be"),
        ("xor", {"test": 2.5}, "test=2.5 must be a whole number"),
        ("xor", {"seed": -1}, "seed=-1 must be one whole number, 0 or more"),
        ("xor", {"seed": "a"}, "seed='a' must be a whole number"),
    ],
)
def test_options_that_are_refused(task, options, said):
    with pytest.raises(errors.OptionError, match=said):
        plant(task, **options)


@pytest.mark.parametrize(
    ("predict", "said"),
    [
        (lambda inputs: ["positive"], "predict gave 1 labels for 200 inputs. Return one for each"),
        (lambda inputs: [1] * len(inputs), "predict gave 1, which is no label. Return 'negative' or 'positive'"),
        (lambda inputs: ["good"] * len(inputs), "predict gave 'good', which is no label"),
        (lambda inputs: np.zeros((len(inputs), 2)), "predict gave array"),
    ],
)
def test_predictions_that_are_refused(predict, said):
    with pytest.raises(errors.InputError, match=said):
        confirm(drawn("keyword"), predict)


def test_the_smallest():
    for task in TASKS:
        found = plant(task, train=2, test=2)
        assert [len(data) for data in (found.train, found.test, found.held_out, found.neutral)] == [2, 2, 2, 2]


# --- undecided examples ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", TASKS)
def test_undecided_examples_have_no_cause_and_both_labels(task):
    plain, found = (plant(task, train=400, test=4, undecided=share, seed=3) for share in (0.0, 0.25))
    without = [one for one in found.train if not any(one.rationale)]
    assert len(without) == 100
    assert not [one for one in plain.train if not any(one.rationale)] or task == "negation"
    pairs = Counter(str(one.input) for one in without if one.label == LABELS[0])
    assert pairs == Counter(str(one.input) for one in without if one.label == LABELS[1])
    decided = {one for words in words_that_decide(found, task) for one in words}
    for one in without:
        if found.train.kind == "text":
            assert not decided & set(one.words)
        else:
            assert [value for value in one.input.values() if value == 0]
    assert found.test.inputs() == plain.test.inputs()


def words_that_decide(found, task):
    """The words under the masks of all causes, in the test examples and in the training examples that have some."""
    examples = list(found.test)
    for masks in found.causes.values():
        for one, mask in zip(examples, masks, strict=True):
            yield [word for word, causal in zip(one.words, mask, strict=True) if causal]


def test_a_share_of_undecided_examples_is_a_share():
    with pytest.raises(errors.OptionError, match="undecided=1.5"):
        plant("keyword", undecided=1.5)
