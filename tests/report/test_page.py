"""The page without a browser: what is in it, how large it is, and that it is the same each time."""

from __future__ import annotations

import csv
import io
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from urllib.parse import unquote

import numpy as np
import pytest

from regard.audited import Audit
from regard.draw import picture
from regard.draw.columns import ON_LIGHT
from regard.judging import CANNOT_TELL
from regard.report import HERE, page
from regard.report.packing import pack
from regard.report.wording import PLAIN


class Texts(HTMLParser):
    """What a reader sees, and the links."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.seen, self.links, self.skipped = [], {}, 0
        self.ids: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.skipped += tag in ("script", "style")
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "a":
            self.links[given["href"]] = given.get("download")

    def handle_endtag(self, tag):
        self.skipped -= tag in ("script", "style")

    def handle_data(self, data):
        if not self.skipped:
            self.seen.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.seen))


@pytest.fixture(scope="module")
def html(shown) -> str:
    return shown.read_text("utf-8")


def test_every_verdict_and_number_is_in_the_text(audit, html):
    text = Texts(html).text
    for title in audit.methods:
        verdict = audit.verdict(title)
        for criterion in verdict.criteria:
            if verdict[criterion.name] == "not tested":
                continue
            assert any(line in text for line in PLAIN[criterion.name])
    for line in CANNOT_TELL:
        assert line in text
    for _, one in audit.findings:
        for part in (one.claim, one.sentence, *one.warnings):
            assert re.sub(r"\s+", " ", part) in text
        assert f"{one.interval.value:.3f} [{one.interval.low:.3f}, {one.interval.high:.3f}]" in text
        for name, table in one.tables.items():
            assert name in text
            for cell in table.select_dtypes("float").to_numpy().ravel():
                assert np.isnan(cell) or f"{cell:.4g}" in text or f"{cell:.3f}" in text
    assert "plausibility needs rationales." in text
    assert "Attention is not Explanation." in text
    assert audit.times["command"] in text
    assert "Not tested: exclusive" not in text
    assert "necessary, hard to manipulate, works out of context, plausible" in text


def test_links_lead_somewhere_and_files_hold_the_tables(audit, html):
    read = Texts(html)
    assert len(read.ids) == len({*read.ids})
    for link in read.links:
        assert link.startswith("data:text/csv") or link[1:] in read.ids, link
    files = {name: unquote(link.split(",", 1)[1]) for link, name in read.links.items() if name}
    finding = next(one for title, one in audit.findings if one.trial == "agreement" and title == "raw")
    rows = [*csv.reader(io.StringIO(files["agreement-raw-pairs.csv"]))]
    assert rows[0] == [*finding.tables["pairs"].columns]
    assert len(rows) == 1 + len(finding.tables["pairs"])
    at = rows[0].index("value")
    np.testing.assert_allclose([float(row[at]) for row in rows[1:]], finding.tables["pairs"]["value"], rtol=1e-5)
    assert "uniform-values.csv" in files


def test_formulas_in_tables_are_no_formulas_in_files(audit):
    title, one = audit.findings[0]
    some = one.values.assign(example="=HYPERLINK(1)")
    files = Texts(page(replace(audit, findings=((title, replace(one, values=some)),)))).links
    assert any("'=HYPERLINK(1)" in unquote(link) for link in files)


def test_the_same_audit_gives_the_same_bytes(audit, html):
    picture._vega.cache_clear()
    assert page(audit) == html


def test_no_torch_is_imported():
    code = "import sys, regard.report; assert 'torch' not in sys.modules, 'torch'; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_size(audit, html):
    bare = page(replace(audit, exhibits=(), maps={}))
    assert len(bare.encode()) <= 300_000
    one = audit.exhibits[0]
    lots = np.random.default_rng(0)
    words = [f"word{at}" for at in range(40)]
    exhibits, maps = [], {}
    for number in range(12):
        weights = lots.dirichlet([0.1] * 40, size=(144, 40))
        panel = {"title": "self-attention", "rows": words, "keys": words, "sites": [f"layer.{at}" for at in range(12)],
                 "effects": lots.random((12, 12)).tolist(), "maps": f"{number}/0"}  # fmt: skip
        scores = {title: lots.random(40).tolist() for title in audit.methods}
        exhibits.append({**one, "words": words, "scores": scores, "panels": [panel]})
        maps[f"{number}/0"] = pack(weights)
    large = page(replace(audit, exhibits=tuple(exhibits), maps=maps))
    assert len(large.encode()) <= 2_000_000
    assert sum(len(one) for one in maps.values()) > 1_200_000  # more than there is room for
    assert "maps are left out" in large


def test_an_audit_of_nothing_is_still_a_page():
    empty = Audit({"model": {"name": "m"}, "data": {"source": "d"}}, {"raw": ("raw", {})}, ())
    text = Texts(page(empty)).text
    assert "No criterion was tested" in text
    assert "m on d" in re.sub(r"\s+", " ", text)


def test_odd_numbers_are_shown_as_what_they_are(audit):
    title, one = audit.findings[0]
    odd = replace(one.interval, value=float("nan"), low=float("nan"), high=float("nan"), n=0)
    made = page(replace(audit, findings=((title, replace(one, interval=odd, reference={})),)))
    assert "nan [nan, nan]" not in made
    assert "not defined" in made


def test_half_a_surrogate_is_spelled_out(audit):
    one = audit.exhibits[0]
    odd = {**one, "words": ["\ud800", "\x00", " ", "<b>"], "predicted": "\udfff"}
    made = page(replace(audit, exhibits=(odd,)))
    made.encode("utf-8")
    assert r"\ud800" in made
    assert r"\udfff" in made
    assert "␣" in made
    assert "<b>&lt;" not in made


def test_what_is_written_on_shades_stays_dark_where_the_page_is():
    style = (HERE / "style.css").read_text()
    assert f'svg [fill="{ON_LIGHT}"] {{ fill: {ON_LIGHT}; }}' in style  # else the page's own ink would win
