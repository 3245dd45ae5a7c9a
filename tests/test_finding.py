"""Findings: what they say, how they are saved, drawn and judged."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import regard
from regard.errors import InputError, OptionError
from regard.finding import Finding, above, below, holds, level, readable
from regard.measures import Interval, bootstrap

NUMBERS = np.linspace(-0.2, 0.4, 40)


def finding(trial="agreement", interval=None, supported=None, **more):
    interval = interval or bootstrap(NUMBERS)
    values = pd.DataFrame({"example": [f"t{i}" for i in range(40)], "predicted": ["a", "b"] * 20, "tau": NUMBERS})
    values.loc[3, "tau"] = np.nan
    more = {"margin": above(interval, 0.1), "reference": {"random": level(0.0)}} | more
    return Finding(trial, "mean τ", interval, supported=supported, sentence="It was tried.", values=values, **more)


@pytest.mark.parametrize(
    ("margin", "said"),
    [((0.2, 0.1, 0.3), True), ((-0.2, -0.3, -0.1), False), ((0.1, -0.1, 0.3), None), ((0.1, 0.0, 0.2), None)],
)
def test_a_claim_holds_when_its_margin_is_above_zero(margin, said):
    assert holds(Interval(*margin, 10, 0)) is said


def test_margins_turn_an_interval_around_a_level():
    interval = Interval(0.3, 0.2, 0.5, 10, 1)
    ends = above(interval, 0.1), below(interval, 0.6)
    assert [one.n for one in ends] == [10, 10]
    assert (ends[0].value, ends[0].low, ends[0].high) == pytest.approx((0.2, 0.1, 0.4))
    assert (ends[1].value, ends[1].low, ends[1].high) == pytest.approx((0.3, 0.1, 0.4))


def test_needed_is_the_number_whose_interval_would_not_reach_zero():
    found = finding(margin=Interval(0.1, -0.1, 0.3, 50, 0))  # half as wide as 0.2, so four times the examples
    assert found.needed == 200
    assert finding(margin=Interval(0.0, -0.1, 0.1, 50, 0)).needed is None
    assert finding(margin=Interval(0.2, 0.1, 0.3, 50, 0), supported=True).needed is None


def test_saved_and_loaded_it_is_the_same(tmp_path):
    table = pd.DataFrame({"pair": ["a", "b"], "value": [0.5, np.nan]})
    shown = ({"example": "t1", "words": ["<b>", "x"], "maps": {"observed": [0.1, 0.9]}, "caption": "Δ"},)
    found = finding(tables={"pairs": table}, shown=shown, settings={"k": np.int64(3)}, failed={"t9": "NaN"},
                    warnings=("few",), claim="It agrees.", charts={"taus": {"kind": "histogram", "x": "tau"}})  # fmt: skip
    again = regard.load_finding(found.save(tmp_path / "finding.json"))
    assert again.to_dict() == found.to_dict()
    pd.testing.assert_frame_equal(again.values, found.values)
    pd.testing.assert_frame_equal(again.tables["pairs"], table)
    assert again.interval == found.interval
    assert math.isnan(again.values.loc[3, "tau"])
    page = again.to_html(tmp_path / "finding.html").read_text()
    assert "&lt;b&gt;" in page
    assert "<b>" not in page
    assert "It agrees." in page


def test_every_kind_of_chart_draws_its_columns():
    curve = pd.DataFrame({"layer": ["top", "bottom"], "tau": [0.9, 0.1], "tau_low": [0.8, 0.0], "tau_high": [1.0, 0.2]})
    charts = {
        "points": {"kind": "points", "x": "tau", "y": "tau", "by": "predicted"},
        "counts": {"kind": "histogram", "x": "tau", "level": 0.1},
        "curve": {"kind": "lines", "table": "curve", "x": "layer", "y": "tau"},
    }
    found = finding(charts=charts, tables={"curve": curve})
    assert found.plot().title == "points"
    assert len(found.plot("points").values) == 39, "the row without a number is not drawn"
    assert found.plot("curve").values.tolist() == curve[["tau", "tau_low", "tau_high"]].to_numpy().tolist()
    assert found.plot("levels").values.tolist() == [found.statistic, 0.0]
    for name in charts:
        assert found.plot(name).svg().startswith("<svg")
    with pytest.raises(OptionError, match="'tree'"):
        found.plot("tree")


@pytest.mark.parametrize(
    ("content", "said"), [("{", "no finding"), ("[]", "no finding of this version"), (None, "nowhere")]
)
def test_what_is_no_finding_is_refused(tmp_path, content, said):
    path = tmp_path / ("nowhere.json" if content is None else "some.json")
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=said):
        regard.load_finding(path)


def test_paths_must_have_the_right_ending(tmp_path):
    for write, name in ((finding().save, "a.txt"), (finding().to_html, "a.txt"), (regard.verdict([]).to_html, "a.md")):
        with pytest.raises(OptionError, match=r"must end in"):
            write(tmp_path / name)


# --- the verdict -----------------------------------------------------------------------------------------------------


def test_criteria_are_filled_by_their_trials_and_the_rest_is_not_tested():
    judged = regard.verdict([finding("agreement", supported=True), finding("adversarial", supported=False)])
    outcomes = {one.name: judged[one.name] for one in judged.criteria}
    assert outcomes == {
        "consistent": "supported", "exclusive": "not supported", "causal": "not tested", "necessary": "not tested",
        "hard to manipulate": "not tested", "works out of context": "not tested", "plausible": "not tested",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("erasure", "comprehensiveness", "said"),
    [
        (True, True, "supported"), (True, None, "supported"), (None, True, "supported"), (None, None, "inconclusive"),
        (False, None, "not supported"), (False, False, "not supported"), (True, False, "inconclusive"),
    ],
)  # fmt: skip
def test_causal_weighs_two_trials(erasure, comprehensiveness, said):
    both = [finding("erasure", supported=erasure), finding("comprehensiveness", supported=comprehensiveness)]
    assert regard.verdict(both)["causal"] == said


def test_what_is_not_necessary_is_not_supported_and_said_first():
    judged = regard.verdict([finding("uniform_trained", supported=False)])
    assert judged["necessary"] == "not supported"
    assert "uniform attention" in judged.notes[0]
    unclear = regard.verdict([finding("uniform_trained", supported=None)])
    assert unclear["necessary"] == "inconclusive", "that it can do without is not shown by a wide interval"
    assert not any("as well with uniform attention" in line for line in unclear.notes)


def test_the_uniform_trial_at_inference_does_not_fill_necessary():
    judged = regard.verdict([finding("uniform", supported=True)])
    assert judged["necessary"] == "not tested"
    assert judged.frame.iloc[-1]["trial"] == "uniform"


def test_the_frame_has_evidence_references_and_numbers_needed(tmp_path):
    open_case = finding(
        "agreement", margin=Interval(0.1, -0.1, 0.3, 50, 0), settings={"method": "raw"}, warnings=("few",)
    )
    judged = regard.verdict([open_case, finding("plausibility", supported=True, settings={"method": "rollout"})])
    row = judged.frame.set_index("criterion").loc["consistent"]
    assert row["outcome"] == "inconclusive"
    assert row["needed"] == 200
    assert row["references"] == "random 0"
    assert "agreement: few" in judged.notes
    assert any("different explanations: attention, rollout()" in note for note in judged.notes)
    plain = judged.to_dict()
    assert plain["criteria"]["plausible"] == "supported"
    assert "half" in plain["rules"]["consistent"]["rule"]
    page = judged.to_html(tmp_path / "verdict.html").read_text()
    assert page.index("does it tell what the model does") < page.index("does it agree with people")


def test_a_verdict_takes_findings_each_once():
    with pytest.raises(InputError, match="'agreement' twice"):
        regard.verdict([finding(), replace(finding(), sentence="again")])
    with pytest.raises(InputError, match="a float"):
        regard.verdict([0.3])
    with pytest.raises(InputError, match="criterion='nice'"):
        regard.verdict([])["nice"]


@pytest.mark.parametrize(
    ("settings", "same"),
    [
        (({"sites": "last"}, {"method": "raw", "options": {"layer": "last", "heads": "mean", "matrix": False}}), True),
        (({"sites": "last"}, {"method": "raw", "options": {"layer": 0, "heads": "mean"}}), False),
        (({"judged": "gradient"}, {"method": "raw", "options": {}}), False),
        (({"judged": "attention"}, {"sites": "all"}), True),
    ],
)
def test_findings_about_different_explanations_are_noted(settings, same):
    one, other = (finding(name, settings=some) for name, some in zip(("erasure", "agreement"), settings, strict=True))
    noted = any("different explanations" in note for note in regard.verdict([one, other]).notes)
    assert noted is not same


def test_a_single_finding_is_judged_too():
    assert regard.verdict(finding("agreement", supported=True))["consistent"] == "supported"


def test_what_more_examples_would_not_settle_needs_none():
    assert finding(margin=Interval(0.1, -0.1, 0.3, 50, 0), settles=False).needed is None


def test_three_columns_are_read_as_one():
    table = pd.DataFrame(
        {"site": [0, 1], "moved": [0.1, np.nan], "moved_low": [0.05, np.nan], "moved_high": [0.2, np.nan]}
    )
    assert readable(table).to_dict(orient="list") == {"site": [0, 1], "moved": ["0.100 [0.050, 0.200]", "–"]}
