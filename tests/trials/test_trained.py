"""Trials that train models: where they must support their claim, and where they must not."""

from __future__ import annotations

import logging

import gated
import numpy as np
import pytest
import torch

import regard
from regard.errors import InputError, NotServed, OptionError
from regard.lessons import Lab
from regard.trials import adversary

NAMES = ("adversary", "deceive", "guide", "rationale_trained", "seeds", "uniform_trained")
QUICK = {
    "adversary": {"lambdas": [0, 0.01, 0.1], "searched": 10, "steps": 20}, "deceive": {"mask": gated.GOOD + gated.BAD},
    "rationale_trained": {"share": 0.25},
}  # fmt: skip


@pytest.fixture(scope="module")
def data():
    return gated.data()


@pytest.fixture(scope="module")
def gate():
    return gated.recipe()


@pytest.fixture(scope="module")
def decoupled():
    return gated.recipe(decoupled=True, epochs=12)


def tried(recipe, data, name, **options):
    return regard.trial(recipe, data, name, **{"seeds": 3, **QUICK.get(name, {}), **options})


# --- each where it must support, and where it must not ---------------------------------------------------------------


def test_attention_that_decides_is_necessary_and_attention_that_does_not_is_not(gate, decoupled, data):
    needed, idle = tried(gate, data, "uniform_trained"), tried(decoupled, data, "uniform_trained")
    assert needed.supported is True
    assert needed.margin.low > 0.1
    assert "Attention is needed" in needed.sentence
    assert idle.supported is False
    assert abs(idle.margin.value) < 0.02
    assert regard.verdict([needed])["necessary"] == "supported"
    verdict = regard.verdict([idle])
    assert verdict["necessary"] == "not supported"
    assert any("the other criteria mean little" in line for line in verdict.notes)


def test_seeds_agree_where_the_data_say_where_to_look(gate, decoupled, data):
    same, other = tried(gate, data, "seeds"), tried(decoupled, data, "seeds", seeds=5)
    assert same.supported is True
    assert same.statistic < 0.05 < same.reference["shuffled"].value
    assert other.supported is not True
    assert other.settings["between_seeds"] > 0.3


def test_looking_elsewhere_is_paid_for_where_attention_decides(gate, decoupled, data):
    hard, easy = (tried(one, data, "adversary", seeds=5) for one in (gate, decoupled))
    assert hard.supported is True
    assert hard.statistic > 0.01 > hard.reference["other seeds"].high
    assert hard.reference["imitation"].high < 0.01
    assert easy.supported is False
    assert easy.statistic < 0.005
    points = easy.tables["points"]
    assert points[points["kind"] == "adversary"]["jsd"].max() > easy.settings["between_seeds"]
    assert {*points["kind"]} == {"adversary", "other seeds", "base", "one by one"}
    assert regard.verdict([hard])["hard to manipulate"] == "supported"
    assert regard.verdict([easy])["hard to manipulate"] == "not supported"


def test_weights_that_know_the_context_guide_and_others_mislead(decoupled):
    helps = tried(gated.recipe(pointer=True, epochs=12), gated.pointing(), "guide", adversary=0.1)
    misleads = tried(decoupled, gated.data(train=40, noise=12), "guide", seeds=4)
    assert helps.supported is True
    assert helps.statistic > 0.1
    assert misleads.supported is False
    assert misleads.statistic < 0
    assert regard.verdict([helps])["works out of context"] == "supported"


def test_what_attention_carries_cannot_be_hidden_and_what_it_does_not_can(gate, data):
    paid = tried(gate, data, "deceive", lambdas=[0, 1, 10])
    free = gated.recipe(decoupled=True, epochs=30, patience=None)
    hidden = tried(free, data, "deceive", lambdas=[0, 1, 10])
    assert paid.supported is True
    assert paid.margin.low > 0.1
    assert hidden.supported is False
    assert "hidden this from an audit" in hidden.sentence
    table = hidden.tables["hidden"].set_index("λ")
    assert table.loc["10", "mass"] < 0.1 * table.loc["0", "mass"]
    assert table.loc["10", "score"] == table.loc["0", "score"] == 1
    assert hidden.tables["without these words"]["score"].item() < 0.7


def test_hiding_what_is_not_needed_means_nothing(decoupled, data):
    found = tried(decoupled, data, "deceive", mask=lambda word: word.startswith("plain"), lambdas=[0, 1])
    assert found.supported is None
    assert "can be done without them" in found.sentence


def test_a_rationale_that_holds_the_cause_is_enough(gate, decoupled, data):
    enough, misled = tried(gate, data, "rationale_trained"), tried(decoupled, data, "rationale_trained")
    assert enough.supported is True
    assert enough.statistic > 0.95
    assert enough.reference["full text"].value - enough.statistic < 0.05
    assert misled.supported is not True
    side = tried(gate, data, "rationale_trained", contiguous=True, method="leave_one_out")
    assert "side by side" in side.sentence
    assert side.supported is True
    assert side.settings["contiguous"] is True


# --- what all of them promise ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_finding_is_whole_survives_being_saved_and_is_the_same_again(name, data, tmp_path):
    found, again = (tried(gated.recipe(), data, name, seeds=2) for _ in range(2))
    assert found.to_dict() == again.to_dict()
    assert len(found.values) == 80, "a row for each test example"
    assert set(found.values["predicted"]) == {"bad", "good"}
    assert found.interval.low <= found.statistic <= found.interval.high
    assert found.reference
    for chart in (*found.charts, "levels"):
        assert found.plot(chart).values.size
    kept = regard.load_finding(found.save(tmp_path / "finding.json"))
    assert kept.to_dict() == found.to_dict()
    assert kept.to_html(tmp_path / "finding.html").stat().st_size > 1000


@pytest.mark.parametrize("name", NAMES)
def test_a_subject_without_a_recipe_is_told_which_fits(name):
    subject = regard.pooled(regard.models.toys.decisive())
    with pytest.raises(NotServed, match=r"does not say how it was trained.*recipes.attention_classifier\(\)"):
        regard.trial(subject, ["so good", "so bad"] * 20, name)


def test_any_trial_takes_a_recipe(gate, data):
    found = regard.trial(gate, data, "permutation", n=5, examples=30)
    assert found.settings["examples"] == 30
    assert found.supported is True


def test_no_model_is_trained_twice(data, monkeypatch):
    recipe = gated.recipe()
    built = []
    call = gated.Build.__call__
    monkeypatch.setattr(
        gated.Build, "__call__", lambda self, train, seed: built.append(seed) or call(self, train, seed)
    )
    seeds = []
    from regard import teaching

    fit = teaching.fit
    monkeypatch.setattr(
        teaching, "fit", lambda *args, **options: seeds.append(options["seed"]) or fit(*args, **options)
    )
    tried(recipe, data, "seeds")
    assert seeds == [0, 1, 2]
    tried(recipe, data, "uniform_trained")
    assert seeds == [0, 1, 2, 0, 1, 2], "three with uniform attention, and the plain ones are there"
    tried(recipe, data, "adversary", lambdas=[0.1], seeds=2, searched=0)
    assert seeds[6:] == [1000, 1001, 1000, 1001], "0 is part of every grid"
    tried(recipe, data, "adversary", lambdas=[0, 0.1, 1], seeds=2, searched=0)
    assert seeds[10:] == [1000, 1001], "only what is new"


# --- the curve, by hand ----------------------------------------------------------------------------------------------


def test_what_is_paid_lies_between_two_points_or_beyond():
    points = [(0.1, 0.0), (0.3, 0.2), (0.5, 0.6)]
    assert adversary._between(points, 0.2) == pytest.approx(0.1)
    assert adversary._between(points, 0.4) == pytest.approx(0.4)
    assert adversary._between([*points, (0.6, 0.3)], 0.4) == pytest.approx(0.3), "farther for less"
    assert adversary._between(points, 0.05) == 0.0
    assert adversary._between(points, 0.9) == 0.6, "the farthest"


def test_the_interval_of_what_is_paid_is_that_of_a_slow_bootstrap():
    draws = np.random.default_rng(0)
    curve = {
        factor: (draws.uniform(0, 0.2, (3, 40)) + 0.2 * at, draws.uniform(0, 0.1, (3, 40)) + 0.1 * at)
        for at, factor in enumerate((0.0, 0.1, 1.0))
    }
    found = adversary._paid(curve, 0.35, seed=1)
    lots, slow = np.random.default_rng(7), []
    factor = np.sqrt(3 / 2) * 4.302652729911275 / 1.959963984540054  # Student's t with two degrees of freedom

    def paid(models, examples):
        points = [(far[models][:, examples].mean(), moved[models][:, examples].mean()) for far, moved in curve.values()]
        return np.interp(0.35, *zip(*sorted(points), strict=True))

    value = paid(np.arange(3), np.arange(40))
    for _ in range(2000):
        models, examples = lots.integers(3, size=3), lots.integers(40, size=40)
        slow.append(paid(models, examples) + (factor - 1) * (paid(models, np.arange(40)) - value))
    assert found.value == pytest.approx(value)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(slow, [0.025, 0.975])), abs=0.004)


def test_divergence_and_total_variation_are_what_the_definitions_say(data):
    lab = Lab.of(gated.recipe(), data)
    one, other = lab.results(lab.plain(2), "two")
    subjects = [lab.subject(lesson) for lesson in lab.plain(2)]
    for place in (0, 7, 31):
        text = lab.data["test"][place].input
        maps, chances = [], []
        for subject in subjects:
            t = regard.trace(subject, text)
            maps.append(t.sites[0].weights()[0, 0, 0].double().numpy())
            chances.append(torch.sigmoid(t.output.double()).item())
        middle = (maps[0] + maps[1]) / 2
        expected = sum(0.5 * np.sum(some * np.log(some / middle)) for some in maps)
        assert lab.jsd(one, other, [0])[place] == pytest.approx(expected, abs=1e-6)
        assert lab.tvd(one, other)[place] == pytest.approx(abs(chances[0] - chances[1]), abs=1e-6)


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "problem", "says"),
    [
        ("adversary", {"lambdas": []}, OptionError, r"lambdas=\[\] must be a list of numbers"),
        ("adversary", {"lambdas": [0, 0]}, OptionError, "each once"),
        ("adversary", {"lambdas": [-1]}, OptionError, "lambdas=-1 must be a number 0 or more"),
        ("adversary", {"lambdas": 0.1}, OptionError, "lambdas=0.1 must be a list"),
        ("adversary", {"seeds": 1}, OptionError, "seeds=1: it takes 2 models"),
        ("adversary", {"epsilon": 2}, OptionError, "epsilon=2 must be"),
        ("seeds", {"seeds": 0}, OptionError, "seeds=0 must be 1 or more"),
        ("guide", {"seeds": 1}, OptionError, "seeds=1: it takes 2 models"),
        ("adversary", {"effort": 0}, OptionError, "effort=0 must be 1 or more"),
        ("uniform_trained", {"seeds": "x"}, OptionError, "seeds='x'"),
        ("uniform_trained", {"sites": 7}, InputError, "sites=7 is not there"),
        ("guide", {"adversary": -1}, OptionError, "adversary=-1"),
        ("deceive", {"mask": None}, NotServed, "which words are impermissible"),
        ("deceive", {"mask": "he"}, OptionError, r"One word is \['he'\]"),
        ("deceive", {"mask": ["zebra"]}, InputError, r"mask=\['zebra'\] covers nothing: none of .* words in train"),
        ("deceive", {"mask": lambda word: True}, InputError, "covers everything"),
        ("deceive", {"lambdas": [0]}, OptionError, "one above 0 at least"),
        ("deceive", {"heads": "median"}, OptionError, "heads='median'"),
        ("rationale_trained", {"share": 2}, OptionError, "share=2"),
    ],
)  # fmt: skip
def test_bad_options_are_named(gate, data, name, options, problem, says):
    with pytest.raises(problem, match=says):
        tried(gate, data, name, **options)


def test_a_lambda_with_which_training_diverges_is_reported_with_its_losses(data, monkeypatch, caplog):
    from regard import aims

    loss = aims.Against.loss

    def explode(self, step):
        return loss(self, step) * (
            torch.inf if self.factor == 5 and torch.is_grad_enabled() and explode.steps > 9 else 1
        )

    explode.steps = 0

    def counted(self, step):
        explode.steps += self.factor == 5
        return explode(self, step)

    monkeypatch.setattr(aims.Against, "loss", counted)
    with caplog.at_level(logging.WARNING, "regard"):
        found = tried(gated.recipe(), data, "adversary", lambdas=[0, 0.1, 5], seeds=2, searched=0)
    assert "Training diverged for λ = 5" in found.sentence
    assert sum("λ = 5, seed" in line and "diverged" in line for line in found.warnings) == 2
    assert {*found.tables["points"].dropna(subset="factor")["factor"]} == {0, 0.1}
    assert "5" in set(found.tables["losses"]["λ"]), "what there was of its loss"


def test_labels_that_do_not_fit_the_head_are_refused_before_anything_is_trained(data):
    odd = regard.data.Dataset.of([*data, regard.data.Example("plain0 plain1", "meh", split="test")])
    with pytest.raises(
        InputError, match=r"1 labels do not fit the head of the model: 'meh' \(in test\). It has 'bad', 'good'"
    ):
        tried(gated.recipe(), odd, "seeds")
