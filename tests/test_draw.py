"""Pictures: safe, self-contained, and really drawn."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from xml.dom import minidom

import numpy as np
import pytest
from PIL import Image

from regard.draw import (
    bars,
    heads_grid,
    image_map,
    page,
    shaded_html,
    shaded_terminal,
    text_line,
    token_map,
    tree,
    tree_edges,
)
from regard.draw.picture import INK, NEGATIVE, POSITIVE
from regard.errors import OptionError

ROOT = Path(__file__).parent.parent
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    'x id="clip0" fill="url(#gradient_0)" & \'',
    "a\x00\ud800b\n",
]
SHOWN = [*HOSTILE[:3], r"a\x00\ud800b\n"]  # what no file can hold is spelled out
TOLD = {"title": "Why 'positive'?", "caption": "gradient × input"}


def grid():
    return heads_grid(np.linspace(0, 1, 6).reshape(2, 3), [["a", "b", "c"], ["<d>", "e", "f"]], title="t", legend="l")


def flows():
    """Five tokens, three layers; the edges are worked out by hand in the test of `tree_edges`."""
    values = np.zeros((3, 5, 5))
    values[2, 3, :4] = [1, 8, 0, 16]
    values[2, 1, 2] = 10
    values[1, 1, :3] = [5, 0, 10]
    values[1, 3, :3] = [10, 0, 7]
    values[0, 2, 4] = 3
    values[:, 0] = 100
    return values


def every(words, values=(0.1, -0.4, 0.3, 0.2)):
    """Each kind of picture that shows words, of the same four words."""
    square = np.outer(values, values)
    cube = np.abs(np.stack([square, square.T]))
    return {
        "text": text_line(words, values, special=[True, False, False, False], **TOLD),
        "bars": bars(words, values, **TOLD),
        "heads": heads_grid(square, [words] * 4, legend="score", **TOLD),
        "tokens": token_map(square, words, words, legend="score", **TOLD),
        "tree": tree(cube, words, threshold=0.1, **TOLD),
    }


def texts(svg: str, tag: str = "text") -> list[str]:
    found = minidom.parseString(svg).getElementsByTagName(tag)
    return ["".join(node.data for node in one.childNodes if node.nodeType == node.TEXT_NODE) for one in found]


def rows(picture, layer: int = 0) -> list[dict]:
    spec = picture.chart.to_dict()
    data = spec["layer"][layer].get("data") or spec["data"]
    return json.loads(spec["datasets"][data["name"]])


def test_words_are_escaped_and_shaded_by_their_share():
    html = shaded_html(["<script>alert(1)</script>", "b", "c"], [0.2, 0.4, -0.1])
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    assert re.findall("background:(#\\w{8})", html) == [f"{POSITIVE}80", f"{POSITIVE}ff", f"{NEGATIVE}40"]
    assert 'title="1: b, 0.4"' in html
    assert shaded_terminal(["a", "b"], [0.0, 0.0]).plain == " a  b "
    assert [str(span.style) for span in shaded_terminal(["a", "b"], [0.0, -2.0]).spans] == [
        "#000000 on #ffffff", f"#000000 on {NEGATIVE}",
    ]  # fmt: skip


@pytest.mark.parametrize("words", [HOSTILE, ["so", "so", "so", "good"]], ids=["hostile", "repeated"])
def test_every_word_is_shown_once_for_each_position_and_never_run(words):
    shown = SHOWN if words is HOSTILE else words
    for kind, picture in every(words).items():
        svg, html = picture.svg(), picture.html()
        assert "<script" not in svg + html, kind
        assert "<img" not in svg + html, kind
        said = texts(svg, "title")  # here words are whole; labels are cut where they are long
        if kind == "text":
            assert [text for text in texts(svg) if text in shown] == shown
        elif kind == "heads":
            assert [one.split(": ", 1)[1].split(" ", 1)[1] for one in said] == shown * 4
        else:
            labels = [text for text in texts(svg) if re.match(r"\d: ", text)]
            assert {label[0] for label in labels} == set("0123"), kind
        if kind in ("text", "bars", "tokens"):
            assert all(any(f"{i}: {word}, " in one for one in said) for i, word in enumerate(shown)), kind


def test_values_are_told_on_hover():
    drawn = every(list("abcd"))
    assert texts(drawn["text"].svg(), "title") == ["0: a, 0.1", "1: b, -0.4", "2: c, 0.3", "3: d, 0.2"]
    assert texts(drawn["bars"].svg(), "title") == ["1: b, -0.4", "2: c, 0.3", "3: d, 0.2", "0: a, 0.1"]
    assert "1: b → 2: c, -0.12" in texts(drawn["tokens"].svg(), "title")
    assert "layer 1, head 2: -0.12 c" in texts(drawn["heads"].svg(), "title")
    assert "layer 1: 1: b ← 2: c, 0.75 of the layer's largest" in texts(drawn["tree"].svg(), "title")
    assert 'pointer-events="none"' in drawn["heads"].svg()  # a word over a cell does not catch the mouse


def test_pictures_in_one_page_do_not_disturb_each_other():
    drawn = [picture.html() for picture in [*every(list("abcd")).values(), grid(), grid()]]
    drawn.append(image_map(np.zeros((8, 8, 3), np.uint8), np.eye(2), title="t", legend="l").html())
    names = [set(re.findall(r' id="([^"]*)"', html)) for html in drawn]
    used = [set(re.findall(r"url\(#([^)]*)\)", html)) for html in drawn]
    assert all(needed <= defined for needed, defined in zip(used, names, strict=True))
    assert sum(map(bool, used)) == 5  # the five with a legend
    assert drawn[-2] == drawn[-3]  # the same picture: the same file
    different = [defined for i, defined in enumerate(names) if i != len(names) - 2]
    assert sum(map(len, different)) == len(set.union(*different))
    for html in drawn:
        assert not re.search('<script|<style|<link|@import|class="w"', html)
        assert set(re.findall(r"https?://[^\"' ]*", html)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }


def test_pictures_are_saved(tmp_path):
    for kind, picture in every(HOSTILE).items():
        for suffix, start in ((".svg", b"<svg"), (".png", b"\x89PNG"), (".html", b"<!doctype html>")):
            path = picture.save(tmp_path / "new" / kind / f"picture{suffix}")
            assert path.read_bytes().startswith(start)
        svg = (tmp_path / "new" / kind / "picture.svg").read_text()
        assert {"Why 'positive'?"} <= set(texts(svg, "text"))
        assert "gradient × input" in svg
    with pytest.raises(OptionError, match=r"'\.pdf'.*'\.html', '\.svg', '\.png'"):
        grid().save(tmp_path / "chart.pdf")
    assert not (tmp_path / "chart.pdf").exists()
    assert grid().save(str(tmp_path / "A.SVG")).exists()
    assert repr(grid()) == "Picture(title='t', caption='')"


def test_title_and_caption_are_escaped_and_broken_into_lines():
    picture = text_line(["a"], [1], title="<b>" + "long " * 40, caption="<i>" + "longer " * 40)
    assert "<b>" not in picture.html()
    assert "&lt;b&gt;long" in picture.html()
    lines = texts(picture.svg(), "tspan")
    assert len(lines) > 6
    assert max(map(len, lines)) <= 60
    assert "" not in texts(bars(["a"], [1], title="t", caption="").svg())


def test_the_text_is_readable_and_special_words_are_told_apart():
    def light(colour: str) -> float:
        channels = np.array(list(bytes.fromhex(colour[1:]))) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        return float(linear @ [0.2126, 0.7152, 0.0722]) + 0.05

    for colour in (POSITIVE, NEGATIVE, "#ffffff"):
        assert light(colour) / light(INK) > 4.5  # WCAG's least contrast for text
    for special in ([True, False, False], np.array([True, False, False])):
        picture = text_line(["[CLS]", "good", "[x]"], [0.5, 0.2, 0.1], special=special, **TOLD)
        assert picture.html().count("dashed") == 1
        assert [row["frame"] is None for row in rows(picture)] == [False, True, True]
    assert f"color:{INK}" in picture.html()  # dark words on a light card, also where a page is dark


def test_long_texts_are_wrapped_and_nothing_overlaps():
    words = ["word", "an", "unbelievably", "x" * 300, "日本語"] * 30
    placed = rows(text_line(words, np.ones(150), **TOLD))
    assert len(placed) == 150
    assert max(place["right"] for place in placed) <= 101 * 8.4
    for before, after in pairwise(placed):
        assert after["top"] > before["top"] or after["left"] > before["right"]


def test_zeros_are_not_shaded_and_constants_are_drawn():
    zero = text_line(["a", "b"], [0, 0], **TOLD)
    assert re.findall("background:(#\\w{8})", zero.html()) == [f"{POSITIVE}00"] * 2
    flat = [
        zero,
        bars(["a", "b"], [0, 0], **TOLD),
        heads_grid(np.zeros((2, 2)), legend="l", title="t"),
        heads_grid(np.full((1, 1), -3.0), legend="l", title="t"),
        token_map(np.full((2, 2), 0.5), ["a", "a"], ["b", "b"], legend="l", **TOLD),
    ]
    for picture in flat:
        svg = picture.svg()
        assert not re.search("NaN|Infinity|undefined", svg)
        assert "<title>" in svg


def test_signs_have_colours():
    def scale(values):
        picture = token_map(values, ["a", "b"], ["a", "b"], legend="l", **TOLD)
        return picture.chart.to_dict()["layer"][0]["encoding"]["color"]["scale"]

    assert scale([[0, 0.5], [0.25, 0]]) == {"scheme": "cividis", "domain": [0, 0.5]}
    signed = scale([[0, 0.5], [-2, 0]])
    assert signed["domain"] == [-2, 0, 2]  # around 0, on both sides to the same end
    assert signed["range"] == [NEGATIVE, "#fff", POSITIVE]
    grid = heads_grid([[0.0, 50.0], [-200.0, 0.0]], title="t", legend="l")
    assert grid.chart.to_dict()["layer"][0]["encoding"]["color"]["scale"] == signed | {"domain": [-200, 0, 200]}
    orange, white, blue = (f"rgb{tuple(bytes.fromhex(colour))}" for colour in (NEGATIVE[1:], "ffffff", POSITIVE[1:]))
    bar = bars(list("ab"), [2, -1], **TOLD).svg()
    assert [re.search(f'fill="(#[^"]*)"><title>{i}', bar)[1] for i in (0, 1)] == [POSITIVE, NEGATIVE]
    cells = re.findall('fill="(rgb[^"]*)"', grid.svg())
    assert (cells[0], cells[2], cells[3]) == (white, orange, white)
    assert token_map([[-1, 1]], ["q"], ["a", "b"], legend="l", **TOLD).svg().count(blue) >= 2  # the cell, the legend


def test_bars_take_the_largest_by_size_and_keep_positions():
    picture = bars(["so"] * 20, np.linspace(-1, 0.9, 20), top=3, **TOLD)
    assert [row["feature"] for row in rows(picture)] == ["0: so", "1: so", "19: so"]
    assert len(picture.values) == 20
    assert [row["feature"] for row in rows(bars(["b", "a"], [1, 1], **TOLD))] == ["0: b", "1: a"]


def test_many_tokens_keep_their_cells_and_lose_labels():
    picture = token_map(np.random.default_rng(0).random((2, 301)), ["q", "q"], ["t"] * 301, legend="l", **TOLD)
    svg = picture.svg()
    assert len([label for label in texts(svg) if re.match(r"\d+: t", label)]) == 101  # every third
    assert svg.count("<title>") == 602
    with pytest.raises(OptionError, match=r"\(300, 300\).*65536"):
        token_map(np.zeros((300, 300)), ["t"] * 300, ["t"] * 300, legend="l", **TOLD)


def test_what_looks_like_a_number_or_a_date_stays_a_word():
    words = ["1.50", "null", "2020-01-01", "true", "007"]
    assert [word for word in texts(text_line(words, range(5), **TOLD).svg()) if word in words] == words


def test_tree_edges_by_hand():
    # The top: row 3 takes 1 + 8 from others in layer 2 and 10 + 7 in layer 1, row 1 only 10 + 15, row 0 does not count.
    # Layer 2, over 16: 3 takes 8/16 from 1; 1 would take 10/16 from 2, but is not yet in the tree.
    # Layer 1, over 10: 0 is taken from by 3 (10) and 1 (5), 2 by 1 (10) and 3 (7): the strongest wins.
    # Layer 0, over 3: 2 takes all from 4; the row 0 is in the tree, but takes nothing.
    assert tree_edges(flows(), 0.4) == [(2, 3, 1, 0.5), (1, 3, 0, 1.0), (1, 1, 2, 1.0), (0, 2, 4, 1.0)]
    assert tree_edges(flows(), 0.5) == [(1, 3, 0, 1.0), (1, 3, 2, 0.7), (0, 2, 4, 1.0)]  # above, not at
    assert tree_edges(flows(), 0.8) == [(1, 3, 0, 1.0)]
    assert tree_edges(np.zeros((2, 3, 3))) == []
    assert tree_edges(-flows()) == []
    assert tree_edges([[[0, 0], [1, 0]], [[0, 0], [-1, 0]]]) == []  # nothing is taken, all layers together


def test_the_tree_is_drawn_where_its_edges_are():
    picture = tree(flows(), ["[CLS]", "so", "so", "good", "."], **TOLD)
    lines = [(row["from"], row["to"], row["query"], row["key"]) for row in rows(picture, 1)]
    assert lines == [(3, 2, "3: good", "1: so"), (2, 1, "3: good", "0: [CLS]"), (2, 1, "1: so", "2: so"), (1, 0, "2: so", "4: .")]  # fmt: skip
    assert rows(picture, 0)[0] == {"token": "3: good", "level": 3, "floor": 0}
    assert texts(picture.svg(), "title")[0] == "layer 2: 3: good ← 1: so, 0.5 of the layer's largest"
    assert "more than 0.4" in picture.caption


def test_values_are_kept_as_they_were_given(tmp_path):
    values = np.array([3.0, -4.0])
    picture = text_line(["a", "b"], values, **TOLD)
    values[:] = 0
    assert picture.values.tolist() == [3.0, -4.0]
    shown = np.asarray(Image.open(io.BytesIO(picture.save(tmp_path / "a.png").read_bytes())).convert("RGB"))
    assert (shown == list(bytes.fromhex(NEGATIVE[1:]))).all(-1).sum() > 100


AB = ["a", "b"]


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: text_line(AB, [1, np.nan], **TOLD), "values.*NaN"),
        (lambda: text_line(AB, [1, 2, 3], **TOLD), "words has 2.*values has 3"),
        (lambda: text_line(AB, [1, 2], special=[True], **TOLD), "special has 1.*values has 2"),
        (lambda: text_line([], [], **TOLD), r"values.*\(0,\)"),
        (lambda: text_line(AB, ["x", "y"], **TOLD), "values must be numbers"),
        (lambda: bars(AB, [1, np.inf], **TOLD), "values.*Inf"),
        (lambda: bars(AB, [1], **TOLD), "words has 2.*values has 1"),
        (lambda: bars([], [], **TOLD), r"values.*\(0,\)"),
        (lambda: bars(AB, [1, 2], top=0, **TOLD), "top=0"),
        (lambda: heads_grid([[np.nan]], title="t", legend="l"), "values.*finite"),
        (lambda: heads_grid([1, 2], title="t", legend="l"), r"\(layer, head\).*\(2,\)"),
        (lambda: heads_grid([[1, 2]], [["a"]], title="t", legend="l"), r"labels.*\[1\].*\(1, 2\)"),
        (lambda: token_map([[1, 2]], AB, AB, legend="l", **TOLD), "rows has 2.*values has 1"),
        (lambda: token_map([[1, 2]], ["a"], ["a"], legend="l", **TOLD), "columns has 1.*values has 2"),
        (lambda: token_map([[1, -np.inf]], ["a"], AB, legend="l", **TOLD), "values.*Inf"),
        (lambda: token_map(np.zeros((0, 2)), [], AB, legend="l", **TOLD), r"values.*\(0, 2\)"),
        (lambda: tree(np.ones((1, 2, 2)), ["a"], **TOLD), "tokens has 1.*values has 2"),
        (lambda: tree(np.ones((1, 2, 3)), ["a"] * 3, **TOLD), r"values.*\(1, 2, 3\)"),
        (lambda: tree(np.ones((1, 1, 1)), ["a"], **TOLD), r"values.*\(1, 1, 1\)"),
        (lambda: tree(np.full((1, 2, 2), np.nan), AB, **TOLD), "values.*NaN"),
        (lambda: tree(np.zeros((1, 2, 2)), AB, **TOLD), "threshold=0.4"),
        (lambda: tree(np.ones((1, 2, 2)), AB, threshold=1, **TOLD), "threshold=1"),
    ],
)  # fmt: skip
def test_what_cannot_be_drawn(draw, message):
    with pytest.raises(OptionError, match=message):
        draw()


@pytest.mark.browser
@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_browser_shows_the_page_and_runs_nothing(tmp_path):
    file = tmp_path / "page.html"
    pictures = every(HOSTILE)
    parts = [("<img src=x onerror=alert(1)>", [grid()]), ("<script>alert(2)</script>", list(pictures.values()))]
    file.write_text(page("A <b>title</b>", "note", parts))
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "A &lt;b&gt;title&lt;/b&gt;" in done.stdout
    assert not re.search("<img|<script|onerror=[^a]", done.stdout)
    assert done.stdout.count("<svg") == 5  # the text is HTML
    assert done.stdout.count("<figure") == 6
    assert "&lt;d&gt;" in done.stdout
    for outside in ("http:", "https:"):
        links = done.stdout.replace("http://www.w3.org/", "")
        assert outside not in links
