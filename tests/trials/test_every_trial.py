"""What every trial promises, and what `regard.trial` does for all of them."""

from __future__ import annotations

import inspect
import logging
import random
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from polar import of_kind

import regard
from regard import trying
from regard.data import Dataset, Example
from regard.errors import InputError, NoSuchPart, NotServed, OptionError, TooLong, TrialFailed
from regard.models.toys import POLARITY

ROOT = Path(__file__).parents[2]
TRIALS = {
    "adversarial", "agreement", "comprehensiveness", "erasure", "fresh", "permutation", "plausibility", "planted",
    "randomisation", "stability", "sufficiency", "uniform",
}  # fmt: skip
QUICK = {"adversarial": {"k": 2, "steps": 5}, "permutation": {"n": 5}, "stability": {"repeats": 2}}


def texts(count=40, seed=0, least=4):
    draws = random.Random(seed)
    words = [word for word in POLARITY if word[0] != "<"]
    return [" ".join(draws.sample(words, draws.randint(least, 10))) for _ in range(count)]


def examples(count=40):
    """With the label that the polarity gives, and the polar words as rationale."""
    return Dataset.of([
        Example(text, ["negative", "positive"][sum(POLARITY[word] for word in text.split()) > 0],
                tuple(abs(POLARITY[word]) > 0.1 for word in text.split()), id=f"t{place}")
        for place, text in enumerate(texts(count))
    ])  # fmt: skip


@pytest.fixture(scope="module")
def decisive():
    return regard.pooled(regard.models.toys.decisive())


def test_the_catalog_is_complete():
    assert {*trying.found()} >= TRIALS


@pytest.mark.parametrize("name", sorted(TRIALS))
def test_a_file_declares_what_the_list_shows(name):
    one = trying.trial_named(name)
    assert one.claim.endswith(".")
    assert one.reference.endswith(".")
    assert f"{{{one.cite}," in (ROOT / "src/regard/references.bib").read_text()
    assert one.criterion in {"", *(criterion.name for criterion in regard.verdict([]).criteria)}
    assert {*one.needs} <= {"explanation", "classes", "labels", "rationales"}
    parameters = list(inspect.signature(one.function).parameters.values())
    assert parameters[0].name == "case"
    assert all(option.kind is option.KEYWORD_ONLY and option.default is not option.empty for option in parameters[1:])
    row = regard.list_trials().set_index("name").loc[name]
    assert row["claim"] == one.claim


def test_criteria_name_trials_that_say_so():
    for criterion in regard.verdict([]).criteria:
        for name in {*criterion.trials} & TRIALS:
            assert trying.trial_named(name).criterion == criterion.name


@pytest.mark.parametrize("name", sorted(TRIALS - {"planted"}))
def test_same_seed_same_finding_and_the_subject_is_untouched(name, decisive):
    before = {key: value.clone() for key, value in decisive.model.state_dict().items()}
    state = torch.random.get_rng_state()
    data = examples()
    found, again = (regard.trial(decisive, data, name, seed=3, **QUICK.get(name, {})) for _ in range(2))
    assert found.to_dict() == again.to_dict()
    assert all(torch.equal(before[key], value) for key, value in decisive.model.state_dict().items())
    assert torch.equal(state, torch.random.get_rng_state())
    assert len(found.values) == 40, "a row for each example"
    assert found.values["example"].tolist() == [f"t{place}" for place in range(40)]
    assert set(found.values["predicted"]) == {"negative", "positive"}
    assert found.interval.low <= found.statistic <= found.interval.high
    assert found.interval.n + found.interval.undefined == 40
    assert found.reference
    assert found.settings["seed"] == 3
    assert ("method" in found.settings) == ("explanation" in trying.trial_named(name).needs)
    for chart in (*found.charts, "levels"):
        assert found.plot(chart).values.size
    assert regard.load_finding  # saved and read in tests/test_finding.py


@pytest.mark.parametrize("name", sorted(TRIALS - {"planted"}))
def test_a_finding_survives_being_saved(name, decisive, tmp_path):
    found = regard.trial(decisive, examples(), name, **QUICK.get(name, {}))
    again = regard.load_finding(found.save(tmp_path / "finding.json"))
    assert again.to_dict() == found.to_dict()
    assert again.to_html(tmp_path / "finding.html").stat().st_size > 1000


class Fragile:
    """A subject whose model fails on texts with a given word."""

    def __init__(self, subject, word, problem):
        self.inner, self.word, self.problem = subject, word, problem

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def encode(self, inputs):
        if any(self.word in text.split() for text in ([inputs] if isinstance(inputs, str) else inputs)):
            raise self.problem
        return self.inner.encode(inputs)


def test_a_failing_example_is_named_and_the_others_go_on(decisive):
    many = [text.replace("awful", "bad") for text in texts(60, least=5)]
    many[7] += " awful"
    fragile = Fragile(decisive, "awful", TooLong("inputs[0] is too long"))
    found = regard.trial(fragile, many, "permutation", n=5, batch_size=8)
    assert found.failed == {"8": "TooLong: inputs[0] is too long"}
    assert len(found.values) == 59
    assert "8" not in set(found.values["example"]), "rows are numbered from 1"
    assert any("1 examples failed" in line for line in found.warnings)
    whole = regard.trial(decisive, many, "permutation", n=5, batch_size=8)
    assert found.values["predicted"].tolist() == whole.values.drop(index=7)["predicted"].tolist()


def test_too_many_failing_examples_are_an_error(decisive):
    fragile = Fragile(decisive, "so", RuntimeError("no"))
    with pytest.raises(TrialFailed, match=r"more than 20%.*RuntimeError: no"):
        regard.trial(fragile, ["so good", "so bad"] * 10 + ["nice film"] * 20, "permutation", n=2)


def test_what_meets_every_example_alike_is_raised_at_once(decisive):
    with pytest.raises(NoSuchPart, match="sites=7"):
        regard.trial(decisive, texts(), "permutation", n=2, sites=[7])


def test_few_examples_are_refused_or_warned_about(decisive, caplog):
    with pytest.raises(InputError, match="data holds 4 examples"):
        regard.trial(decisive, texts(4), "permutation", n=2)
    with caplog.at_level(logging.WARNING, "regard"):
        found = regard.trial(decisive, texts(12), "permutation", n=2)
    width = found.interval.high - found.interval.low
    assert any("only 12 examples" in line and f"{width:.3g} wide" in line for line in found.warnings)
    assert "only 12 examples" in caplog.text


def test_one_predicted_class_is_said(decisive):
    found = regard.trial(decisive, ["so good", "a superb film", "the plot is moving"] * 12, "permutation", n=2)
    assert any("all examples are predicted as 'positive'" in line for line in found.warnings)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "permutaton"}, "Did you mean 'permutation'"),
        ({"name": "permutation", "number": 3}, "number=3: permutation has no such option"),
        ({"name": "permutation", "method": "rollout"}, "judges no explanation"),
        ({"name": "agreement", "method": "rolout"}, "Did you mean 'rollout'"),
        ({"name": "permutation", "examples": 0}, "examples=0"),
        ({"name": "permutation", "examples": 3}, "examples=3: a trial needs 5"),
        ({"name": "permutation", "seed": -1}, "seed=-1 must be 0 or more"),
        ({"name": "permutation", "n": [2, 3]}, r"n=\[2, 3\] must be 1 or more"),
        ({"name": "permutation", "epsilon": "x"}, "epsilon='x' must be a number above 0, and below 1"),
        ({"name": "permutation", "sites": "lastt"}, "sites='lastt' is not there.* Or pass 'last' or 'all'"),
        ({"name": "agreement", "sites": "all"}, "sites='all': agreement judges an explanation"),
        ({"name": "agreement", "method": 3}, "method=3 must be a name"),
        ({"name": "agreement", "method": ("raw",)}, "must be a name from"),
        ({"name": "comprehensiveness", "bins": 0.5}, "bins=0.5 must be shares"),
        ({"name": "plausibility"}, "plausibility needs rationales, and 40 of 40"),
    ],
)
def test_bad_options_are_named(decisive, options, said):
    with pytest.raises(InputError, match=said):
        regard.trial(decisive, texts(), **options)


def test_a_model_is_no_subject_and_an_encoder_needs_a_target(decisive, minilm):
    with pytest.raises(regard.errors.SubjectError, match="not a subject"):
        regard.trial(decisive.model, texts(), "permutation")
    with pytest.raises(NotServed, match="no classes"):
        regard.trial(minilm, texts(), "permutation")
    with pytest.raises(NotServed, match="no decision"):
        regard.trial(minilm, texts(), "erasure", target=minilm.similarity("a film"))


def test_a_regression_is_measured_in_standard_deviations():
    torch.manual_seed(0)
    wide = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(1, 8), "mix": wide, "down": torch.nn.Linear(8, 1)})

    def forward(scale):
        return lambda model, x: scale * model["down"](model["mix"](model["up"](x[..., None])).mean(1))

    rows = pd.DataFrame(np.random.default_rng(0).normal(size=(40, 5)), columns=list("abcde"))
    small, large = (
        regard.trial(
            regard.module(model.eval(), forward(scale), features=list("abcde"), readout="mean", output="regression"),
            Dataset.of([Example(row) for row in rows.to_dict(orient="records")]), "permutation", n=10,
        )
        for scale in (1.0, 100.0)
    )  # fmt: skip
    assert small.statistic > 0
    np.testing.assert_allclose(small.values["moved"], large.values["moved"], rtol=1e-4, atol=1e-7)  # float32


def test_options_out_of_range_are_refused(decisive):
    with pytest.raises(OptionError, match="n=0"):
        regard.trial(decisive, texts(), "permutation", n=0)


def test_the_spread_of_a_regression_leaves_out_what_fails():
    from regard.cases import Case
    from regard.explaining import job_for

    subject = regard.pooled(regard.models.toys.decisive())
    fragile = Fragile(subject, "awful", TooLong("too long"))
    some = tuple(Example(text, id=str(place)) for place, text in enumerate(["so good", "so bad", "awful", "nice"] * 9))
    case = Case(fragile, None, some[:2] + some[:4] + some[3:4] * 5, "text", job_for(fragile, "raw", {}))
    kept = [text for text in (one.input for one in case.examples) if text != "awful"]
    expected = np.std([subject.forward(subject.encode(text))[0, 0].item() for text in kept])
    object.__setattr__(fragile, "head", type("Head", (), {"kind": "regression"})())
    assert case.scale == pytest.approx(expected, rel=1e-5)


def test_labels_that_the_model_does_not_have_are_listed(decisive):
    some = [Example(text, "positive" if place % 2 else "fine", id=f"t{place}") for place, text in enumerate(texts(40))]
    with pytest.raises(
        InputError, match=r"20 labels are not classes of the model: 'fine' \(.*t0\). It has 'negative', 'positive'"
    ):
        regard.trial(decisive, Dataset.of(some), "uniform")


def test_numbers_that_are_no_class_are_listed_too(decisive):
    some = [Example(text, place % 3, id=f"t{place}") for place, text in enumerate(texts(30))]
    with pytest.raises(InputError, match=r"10 labels are not classes of the model: 2 \(.*t2\)"):
        regard.trial(decisive, Dataset.of(some), "uniform")


def test_too_few_defined_examples_claim_nothing(decisive):
    found = regard.trial(decisive, ["so", "bad", "good", "film", "the plot is awful"] * 2, "agreement")
    assert found.interval.n == 2
    assert found.supported is None
    assert any("2 examples define the statistic" in line for line in found.warnings)


def test_examples_of_one_id_keep_apart(decisive):
    some = [Example(text, id="same") for text in texts(12)]
    found = regard.trial(decisive, Dataset.of(some), "permutation", n=2)
    assert found.values["example"].tolist() == [f"same ({place})" for place in range(12)]


def test_a_target_is_recorded_and_goes_with_its_example(decisive):
    data = examples()
    wanted = ["negative", "positive"] * 20
    some = regard.trial(decisive, data, "comprehensiveness", target=wanted, examples=20, seed=5)
    assert some.settings["target"] == [wanted[place] for place in data.places(20, seed=5)]
    every = regard.trial(decisive, data, "comprehensiveness", target=wanted, examples=None, seed=5)
    of_all = every.values.set_index("example").loc[some.values["example"], "method"]
    np.testing.assert_allclose(some.values["method"], of_all, atol=1e-6)
    one = regard.trial(decisive, data, "comprehensiveness", target=lambda output: output[:, 0])
    assert one.settings["target"] == "<lambda>"


def test_a_failed_batch_is_said_to_have_run_one_by_one(decisive):
    many = [text.replace("awful", "bad") for text in texts(40, least=5)]
    many[3] += " awful"
    found = regard.trial(Fragile(decisive, "awful", RuntimeError("no")), many, "permutation", n=2, batch_size=10)
    assert any("10 examples ran one by one" in line for line in found.warnings)


def test_what_was_produced_is_not_taken_for_the_source(tokenizer):
    subject, data = of_kind("encoder–decoder", tokenizer)
    with pytest.raises(NotServed, match="what was produced only"):
        regard.trial(subject, data, "comprehensiveness", method=("raw", {"layer": 2}))


def test_a_control_on_trial_is_said_to_be_one(decisive):
    found = regard.trial(decisive, texts(), "comprehensiveness", method="position")
    assert any("is a control" in line for line in found.warnings)


def test_a_finding_says_which_model_and_data(decisive, tmp_path):
    path = tmp_path / "reviews.csv"
    path.write_text("text\n" + "\n".join(texts()))
    found = regard.trial(decisive, path, "permutation", n=2)
    assert found.settings["data"] == str(path)
    assert found.settings["model"]["class"] == "Pool"
