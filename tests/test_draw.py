"""Pictures: safe, self-contained, and really drawn."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from regard.draw import heads_grid, page, save_chart, shaded_html, shaded_terminal
from regard.errors import OptionError

ROOT = Path(__file__).parent.parent


def chart():
    return heads_grid(np.linspace(0, 1, 6).reshape(2, 3), [["a", "b", "c"], ["<d>", "e", "f"]], title="t", legend="l")


def test_words_are_escaped_and_shaded_by_their_share():
    html = shaded_html(["<script>alert(1)</script>", "b"], [0.2, 0.4])
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert "0.50)" in html
    assert "1.00)" in html
    assert 'title="0.2000"' in html
    assert shaded_terminal(["a", "b"], [0.0, 0.0]).plain == " a  b "


def test_charts_are_saved(tmp_path):
    for suffix, start in ((".svg", b"<svg"), (".png", b"\x89PNG"), (".html", b"<!DOCTYPE html>")):
        data = save_chart(chart(), tmp_path / f"chart{suffix}").read_bytes()
        assert data.lstrip().startswith(start)
    assert b"cdn" not in (tmp_path / "chart.html").read_bytes()[:2000]
    with pytest.raises(OptionError, match=r"\.pdf"):
        save_chart(chart(), tmp_path / "chart.pdf")
    with pytest.raises(OptionError, match="finite"):
        heads_grid([[float("nan")]], title="t", legend="l")


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_and_runs_nothing(tmp_path):
    file = tmp_path / "page.html"
    file.write_text(
        page("A <b>title</b>", "note", [("<img src=x onerror=alert(1)>", shaded_html(["a"], [1]), chart())])
    )
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "A &lt;b&gt;title&lt;/b&gt;" in done.stdout
    assert "<img" not in done.stdout
    assert done.stdout.count("<svg") == 1
    assert "&lt;d&gt;" in done.stdout
    for outside in ("http:", "https:"):
        links = done.stdout.replace("http://www.w3.org/", "")
        assert outside not in links


def test_the_demo_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "demo.py")],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rests on special tokens" in done.stdout
    assert (tmp_path / "demo" / "readout.html").read_text().count("<svg") == 3
