"""The record of heads: one row for each head, roles, agreement, pictures, pages and files."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
from scipy.stats import spearmanr

import regard
from regard import errors
from regard.probed import Heads, Probed, heads_from, load_heads, tabled

INDEX = pd.DataFrame([{"layer": layer, "site": f"block.{layer}", "kind": "self", "head": head} for layer in range(2) for head in range(3)])  # fmt: skip
LOTS = np.random.default_rng(0)


def probed(name, drawn, labels=None, **rest):
    return Probed(
        name, f"what <b>{name}</b> is", tabled(INDEX, drawn, labels), drawn=drawn, cite="clark2019does", **rest
    )


@pytest.fixture
def made():
    x = LOTS.random((11, 6))
    y = np.where(np.arange(6) == 4, np.nan, x + 0.3 * LOTS.random((11, 6)))
    table = pd.DataFrame({"part <i>": [1.0, 2.0], "share": [0.5, np.nan]})
    chart = {"kind": "points", "table": "extra", "x": "part <i>", "y": "share", "caption": "<script>alert(1)</script>"}
    return Heads(
        INDEX,
        {
            "one": probed("one", x, ["", "previous", "", "<b>", "", ""]),
            "two": probed("two", y, tables={"extra": table}, charts={"points": chart}, sentence="said <script>x</script>"),
        },
        {"three": "it needs <labels>"},
        {"model": "BERT <tiny>", "data": "texts", "examples": 5},
    )  # fmt: skip


def test_values_have_intervals_where_there_are_draws(made):
    drawn = made["one"].drawn
    values = made["one"].values
    np.testing.assert_array_equal(values["value"], drawn[0])
    np.testing.assert_allclose(values["low"], np.quantile(drawn[1:], 0.025, axis=0))
    np.testing.assert_allclose(values["high"], np.quantile(drawn[1:], 0.975, axis=0))
    assert "low" not in tabled(INDEX, drawn[:1])
    assert made["two"].values.loc[4, ["value", "low", "high"]].isna().all()


def test_the_frame_has_a_row_for_each_head(made):
    frame = made.frame()
    assert len(frame) == 6
    assert [*frame] == ["layer", "site", "kind", "head", "one", "one_low", "one_high", "one_label", "two", "two_low", "two_high"]  # fmt: skip
    np.testing.assert_array_equal(frame["one"], made["one"].values["value"])


def test_roles_are_the_heads_with_a_word(made):
    roles = made.roles()
    assert roles["role"].tolist() == ["previous", "<b>"]
    assert roles[["layer", "head"]].to_numpy().tolist() == [[0, 1], [1, 0]]
    assert Heads(INDEX, {"two": made["two"]}).roles().empty


def test_agreement_is_spearman_over_heads_that_both_define(made):
    (row,) = made.agreement().to_dict("records")
    there = np.arange(6) != 4
    wanted = spearmanr(made["one"].drawn[0, there], made["two"].drawn[0, there]).statistic
    assert row["spearman"] == pytest.approx(wanted)
    assert row["heads"] == 5
    assert row["low"] <= row["high"]


def test_pictures(made, tmp_path):
    made.plot().save(tmp_path / "grid.svg")
    assert (tmp_path / "grid.svg").stat().st_size > 0
    made.plot("two", "points").save(tmp_path / "points.svg")
    with pytest.raises(errors.OptionError, match="points"):
        made.plot("two", "lines")
    with pytest.raises(errors.OptionError, match="thre"):
        made.plot("thre")
    empty = Probed("empty", "nothing", tabled(INDEX, np.full((3, 6), np.nan)))
    with pytest.raises(errors.OptionError, match="nothing to draw"):
        empty.plot()


def test_a_page_is_escaped(made, tmp_path):
    page = made.to_html(tmp_path / "new" / "heads.html").read_text("utf-8")
    for raw in ("<script>alert(1)", "<script>x", "<labels>", "BERT <tiny>"):
        assert raw not in page
    assert "&lt;labels&gt;" in page
    assert "not served" in page
    with pytest.raises(errors.OptionError, match=r"must end in \.html"):
        made.to_html(tmp_path / "heads.txt")


def test_files_hold_everything_but_the_draws(made, tmp_path):
    again = load_heads(made.save(tmp_path / "new" / "heads.json"))
    pd.testing.assert_frame_equal(again.frame(), made.frame())
    pd.testing.assert_frame_equal(again.roles(), made.roles())
    pd.testing.assert_frame_equal(again["two"].tables["extra"], made["two"].tables["extra"])
    assert again.refused == made.refused
    assert again.settings == made.settings
    assert again["two"].charts == made["two"].charts
    assert again["one"].drawn is None
    json.dumps(made.to_dict(), allow_nan=False)
    assert heads_from(made.to_dict()).frame().shape == made.frame().shape


def test_files_that_hold_no_heads_are_refused(made, tmp_path):
    with pytest.raises(errors.OptionError, match=r"must end in \.json"):
        made.save(tmp_path / "heads.txt")
    for text in ("{", "[]", '{"suite": "other"}'):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(errors.InputError, match=r"bad\.json"):
            load_heads(tmp_path / "bad.json")
    with pytest.raises(errors.InputError, match="none"):
        load_heads(tmp_path / "none.json")


def test_it_says_what_it_holds(made):
    assert repr(made) == "Heads(6 heads of 2 sites by one, two; not served: three)"
    assert isinstance(regard.list_probes(), pd.DataFrame)
