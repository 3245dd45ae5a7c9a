"""Maps over pictures: values on the right patches, nothing smoothed, nothing run."""

from __future__ import annotations

import io
import json
import re
from base64 import b64decode
from xml.dom import minidom

import numpy as np
import pytest
from PIL import Image

from regard.draw import Picture, image_map
from regard.errors import OptionError

EVIL = """</title><script>alert("1")</script> & 'so'"""


def photo(height=24, width=32):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


def values():
    array = np.linspace(-0.1, 0.2, 12).reshape(3, 4)
    array[1, 2] = 0.9
    return array


def drawn(picture=None, numbers=None, **options):
    picture, numbers = photo() if picture is None else picture, values() if numbers is None else numbers
    return image_map(picture, numbers, **({"title": "Where it looks", "legend": "attention"} | options))


def pixels(made: Picture, path) -> tuple[np.ndarray, int, int]:
    """What the PNG shows of the picture itself, and the size of a patch on it."""
    shown = np.asarray(Image.open(made.save(path / "map.png")).convert("RGB")).astype(float)
    height, width = made.chart.height * 2, made.chart.width * 2  # saved at twice the size
    left = np.nonzero((shown != 255).any(-1))[1].min()
    top = next(row for row in range(len(shown)) if (shown[row, left + 4 : left + width - 4] != 255).any(-1).all())
    size = made.values.shape
    return shown[top : top + height, left : left + width], height // size[0], width // size[1]


def test_raw_values_are_kept_and_drawn():
    given = values()
    made = drawn(numbers=given)
    spec = made.chart.to_dict()
    blocks = json.loads(spec["datasets"][spec["layer"][1]["data"]["name"]])
    assert {(block["row"], block["column"]): block["value"] for block in blocks} == dict(np.ndenumerate(values()))
    given[:] = 0
    assert np.array_equal(made.values, values())  # a copy, not normalised
    colour = spec["layer"][1]["encoding"]["color"]
    assert colour["title"] == "attention"
    assert colour["scale"] == {"domain": [-0.1, 0.9], "scheme": "cividis"}
    assert colour["legend"]["values"] == [-0.1, pytest.approx(0.4), 0.9]
    assert made.title == "Where it looks"


def test_the_picture_lies_under_the_map():
    spec = drawn().chart.to_dict()
    url = json.loads(spec["datasets"][spec["layer"][0]["data"]["name"]])[0]["url"]
    inside = Image.open(io.BytesIO(b64decode(url.removeprefix("data:image/png;base64,"))))
    grey = Image.fromarray(photo()).convert("L")
    assert (inside.mode, inside.size) == ("L", (32, 24))
    assert np.abs(np.asarray(inside).astype(int) - np.asarray(grey)).max() <= 1


def test_the_largest_value_is_the_brightest_patch(tmp_path):
    shown, high, wide = pixels(drawn(picture=np.full((24, 32, 3), 90, np.uint8)), tmp_path)
    inner = slice(4, -4)  # the frame and its shadow stay out
    patches = [
        [shown[row * high :, column * wide :][:high, :wide][inner, inner] for column in range(4)] for row in range(3)
    ]
    light = np.array([[patch.mean() for patch in row] for row in patches])
    assert np.array_equal(np.argsort(light.ravel()), np.argsort(values().ravel()))
    assert np.unravel_index(light.argmax(), light.shape) == (1, 2)
    assert max(patch.std(axis=(0, 1)).max() for row in patches for patch in row) == 0  # one colour each: no smoothing


def test_the_picture_shines_through(tmp_path):
    left = np.zeros((24, 32, 3), np.uint8)
    left[:, :16] = 255
    shown, _, _ = pixels(drawn(picture=left, numbers=np.zeros((3, 4))), tmp_path)
    width = shown.shape[1]
    assert shown[:, : width // 2 - 8].mean() - shown[:, width // 2 + 8 :].mean() == pytest.approx(0.4 * 255, abs=4)


def test_svg_says_each_value_on_hover():
    svg = minidom.parseString(drawn().svg())
    said = [title.firstChild.data for title in svg.getElementsByTagName("title")]
    assert said == [f"patch {row},{column}: {value:.6g}" for (row, column), value in np.ndenumerate(values())]
    texts = [text.firstChild.data for text in svg.getElementsByTagName("text")]
    assert {"Where it looks", "attention", "0.9", "−0.1"} <= set(texts)
    assert drawn()._repr_html_().startswith("<figure")


def test_files_are_self_contained_and_escaped(tmp_path):
    made = drawn(title=EVIL, legend=EVIL)
    for suffix, start in ((".html", b"<!doctype html>"), (".svg", b"<svg"), (".png", b"\x89PNG")):
        data = made.save(tmp_path / "new folder" / f"map{suffix}").read_bytes()
        assert data.startswith(start)
        assert len(data) > 2000
        assert b"<script" not in data
    html = (tmp_path / "new folder" / "map.html").read_text()
    assert html.count("&lt;script&gt;") == 4  # the page's title, the figure's, the legend's and its description
    assert set(re.findall(r"https?://[^\"' ]*", html)) <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    with pytest.raises(OptionError, match=r"\.pdf"):
        made.save(tmp_path / "map.pdf")


def test_constant_values_and_many_patches_are_drawn():
    svg = drawn(numbers=np.full((3, 4), 0.25)).svg()
    assert svg.count("<title>patch") == 12
    assert "NaN" not in svg
    assert drawn(np.zeros((160, 160, 3), np.uint8), np.random.default_rng(0).random((80, 80))).svg().count("<title>patch") == 6400  # fmt: skip


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"numbers": np.full((3, 4), np.nan)}, "values.*NaN"),
        ({"numbers": [[np.inf]]}, "values.*Inf"),
        ({"numbers": np.zeros(12)}, r"values.*\(12,\)"),
        ({"numbers": np.zeros((0, 4))}, r"values.*\(0, 4\)"),
        ({"numbers": np.zeros((5, 4))}, "5×4.*24×32 pixels.*picture"),
        ({"picture": np.zeros((24, 32), np.uint8)}, r"picture.*\(24, 32\)"),
        ({"picture": np.zeros((0, 32, 3), np.uint8)}, r"picture.*\(0, 32, 3\)"),
        ({"picture": np.zeros((24, 32, 3))}, "picture.*float64"),
        ({"alpha": 0}, "alpha=0"),
        ({"alpha": 1.5}, "alpha=1.5"),
    ],
)
def test_what_cannot_be_drawn(options, message):
    with pytest.raises(OptionError, match=message):
        drawn(**options)
