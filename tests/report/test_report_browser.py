"""The page in a real browser: it works, sends nothing, runs nothing that is not its own, and can be read by all."""

from __future__ import annotations

import json
import re
import select
import shutil
import socket
import subprocess
from dataclasses import replace

import pytest
from payloads import MARK, payloads
from report_cases import with_texts

import regard.report
from regard.draw.picture import plain
from regard.report import page

pytestmark = pytest.mark.browser

# For each text on the page the contrast with what lies behind it.
CONTRAST = """(() => {
  const box = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const rgba = (colour) => { box.clearRect(0, 0, 1, 1); box.fillStyle = colour; box.fillRect(0, 0, 1, 1);
    return [...box.getImageData(0, 0, 1, 1).data]; };
  const light = ([r, g, b]) => { const f = (c) => { c /= 255; return c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4; };
    return .2126 * f(r) + .7152 * f(g) + .0722 * f(b) + .05; };
  const behind = (node) => { const seen = [];
    for (let at = node; at; at = at.parentElement) { const c = rgba(getComputedStyle(at).backgroundColor); seen.push(c); if (c[3] === 255) break; }
    let over = [255, 255, 255];
    for (const c of seen.reverse()) over = over.map((x, i) => x + (c[i] - x) * c[3] / 255);
    return over; };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || ['SCRIPT', 'STYLE', 'TITLE', 'title', 'OPTION'].includes(node.tagName)) continue;
    const style = getComputedStyle(node), svg = node.ownerSVGElement;
    const ink = light(rgba(svg ? style.fill : style.color)), paper = light(behind(svg ? svg.parentElement : node));
    found.push([Math.max(ink, paper) / Math.min(ink, paper), node.tagName + ' ' + node.className + ' ' + walker.currentNode.data.trim().slice(0, 30)]);
  }
  return found.sort((a, b) => a[0] - b[0]); })()"""
VISIBLE = "document.body.innerText"


def quiet(browser, file):
    assert browser.console == []
    assert browser.outside(file) == []
    assert browser.dialogs == []


def test_nothing_is_said_or_asked_and_it_loads_at_once(chromium, shown):
    chromium.ask("Performance.enable", timeDomain="threadTicks")  # not those of others on this machine
    chromium.open(shown)
    quiet(chromium, shown)
    spent = {one["name"]: one["value"] for one in chromium.ask("Performance.getMetrics")["metrics"]}
    assert 0 < spent["TaskDuration"] < 1  # seconds of its thread: parsing, style, layout, script
    assert chromium.run("document.documentElement.className") == "scripted"


def test_choosing_an_explanation_changes_scorecards_trials_and_texts(chromium, shown):
    chromium.open(shown)
    card = "document.querySelector('#scorecard').innerText"
    assert "consistent" in chromium.run(card)
    before = chromium.run(card)
    chromium.run("document.querySelector('#card-1').click()")
    after = chromium.run(card)
    assert after != before
    checked = "[...document.querySelectorAll('.tab:checked')].map(one => one.dataset.method)"
    assert "raw" not in chromium.run(checked)  # one choice for all sections
    texts = "[...document.querySelectorAll('.example .line')].filter(one => one.checkVisibility()).map(one => one.innerText)"
    pick = "(() => {{ const one = document.querySelector('#{}'); one.value = '{}'; one.dispatchEvent(new Event('change')); }})()"
    assert [text.split("\n")[0] for text in chromium.run(texts)] == ["raw", "gradient"]
    chromium.run(pick.format("pick-method", "gradient"))
    assert [text.split("\n")[0] for text in chromium.run(texts)] == ["gradient"]
    assert "שלום" in chromium.run(texts)[0]
    chromium.run(pick.format("pick-example", "1"))
    assert "電影" in chromium.run(texts)[0]
    assert "שלום" not in chromium.run(texts)[0]
    quiet(chromium, shown)


def test_a_head_is_chosen_and_tokens_say_where_they_look(chromium, shown, audit):
    chromium.open(shown, high=2000)
    chromium.run("document.querySelector('.panel').open = true")
    chromium.run("new Promise(done => setTimeout(done, 50))")
    cells = "document.querySelectorAll('.panel .map .cell').length"
    drawn = "document.querySelector('.panel .map').innerHTML"
    assert chromium.run(cells) > 4
    pressed = chromium.run("document.querySelector('.panel [aria-pressed=true]').dataset.head")
    effects = [one for site in audit.exhibits[0]["panels"][0]["effects"] for one in site]
    assert max(effects) - effects[int(pressed)] < 0.005  # the one that matters most comes first, as far as is shown
    before = chromium.run(drawn)
    chromium.run(
        "[...document.querySelectorAll('.panel button[data-head]')].find(one => one.ariaPressed === 'false').click()"
    )
    assert chromium.run(drawn) != before
    head = int(chromium.run("document.querySelector('.panel [aria-pressed=true]').dataset.head"))
    weights = regard.report.packing.unpack(audit.maps["0/0"])[head]
    row, key = divmod(int(weights[1:].argmax()) + weights.shape[1], weights.shape[1])
    place = "(() => {{ const box = document.querySelector('.tokens-map').getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; }})()"
    chromium.run("document.querySelector('.tokens-map').scrollIntoView({block: 'center'})")
    left, top, *_ = chromium.run(place.format())
    chromium.move(left + 92 + 20 * key + 10, top + 92 + 20 * row + 10)
    said = chromium.run("document.querySelector('.map output').textContent")
    assert said.endswith(f": {weights[row, key]:.3f}"), said
    tokens = audit.exhibits[0]["panels"][0]["keys"]
    assert said.startswith(f"{tokens[row]} → {tokens[key]}")
    chromium.run("document.querySelectorAll('.look')[2].focus()")
    assert chromium.run("document.querySelector('.map output').textContent").startswith(f"{tokens[2]} looks at")
    quiet(chromium, shown)


def test_tables_are_sorted_and_search_finds(chromium, shown):
    chromium.open(shown)
    chromium.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    column = "[...document.querySelectorAll('#trial-uniform table')].at(-1).tBodies[0].innerText"
    chromium.run(
        "[...document.querySelectorAll('#trial-agreement caption')].find(one => one.textContent.includes('pairs')).closest('table').id = 'sorted'"
    )
    values = "[...document.querySelector('#sorted').tBodies[0].rows].map(row => parseFloat(row.cells[2].textContent))"
    chromium.run("document.querySelectorAll('#sorted th button')[2].click()")
    up = [one for one in chromium.run(values) if one is not None]
    assert up == sorted(up)
    chromium.run("document.querySelectorAll('#sorted th button')[2].click()")
    down = [one for one in chromium.run(values) if one is not None]
    assert down == sorted(up, reverse=True)
    assert chromium.run(column)
    look = "(() => {{ const box = document.querySelector('#search'); box.value = '{}'; box.dispatchEvent(new Event('input')); }})()"
    seen = "[...document.querySelectorAll('.trial')].filter(one => one.checkVisibility()).map(one => one.id)"
    every = chromium.run(seen)
    chromium.run(look.format("LEAVE_ONE_OUT"))
    assert 0 < len(chromium.run(seen)) < len(every)
    chromium.run(look.format("電影"))
    assert "text-1" in chromium.run("document.querySelector('#examples').innerText")
    assert chromium.run(seen) == []
    chromium.run(look.format(""))
    assert chromium.run(seen) == every
    quiet(chromium, shown)


def test_with_scripts_off_everything_can_be_read(chromium, shown, audit):
    chromium.open(shown, scripts=False)
    quiet(chromium, shown)
    text = re.sub(r"\s+", " ", chromium.run(VISIBLE))
    assert chromium.run("document.documentElement.className") == ""
    verdict = audit.verdict()
    for criterion in verdict.criteria:
        if verdict[criterion.name] != "not tested":
            assert criterion.name in text
            assert verdict[criterion.name] in text
    for words in ("so", "שלום", "電影", "👩‍👩‍👧", "Show the numbers"):
        assert words in text
    for title, one in audit.findings:
        number = f"{one.interval.value:.3f} [{one.interval.low:.3f}, {one.interval.high:.3f}]"
        assert number in chromium.run("document.body.textContent"), (title, one.trial)
    chromium.run("document.querySelector('#card-1').click()")  # the tabs are the browser's own
    assert chromium.run("document.querySelectorAll('#scorecard .pane')[1].checkVisibility()")
    assert not chromium.run("document.querySelectorAll('#scorecard .pane')[0].checkVisibility()")


@pytest.mark.parametrize(("wide", "high", "phone"), [(1280, 720, False), (390, 844, True)])
def test_the_first_screen_is_complete(chromium, shown, wide, high, phone):
    chromium.open(shown, wide=wide, high=high, phone=phone)
    for what in ("h1", ".facts", ".criterion .chip", ".criterion p", ".criterion svg"):
        ends = chromium.run(
            f"[...document.querySelectorAll('{what}')].filter(one => one.checkVisibility()).map(one => one.getBoundingClientRect().bottom)"
        )
        assert ends
        assert max(ends) <= high, what
    assert chromium.run("document.documentElement.scrollWidth") <= wide


@pytest.mark.parametrize("wide", [320, 640])  # 640: what is left of 1280 at 200 %
def test_the_page_never_scrolls_sideways(chromium, shown, wide):
    chromium.open(shown, wide=wide, high=600)
    chromium.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    chromium.run("new Promise(done => setTimeout(done, 50))")
    assert chromium.run("document.documentElement.scrollWidth") <= wide


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_contrast(chromium, shown, scheme, tmp_path):
    chromium.open(shown, prefers_color_scheme=scheme)
    chromium.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    chromium.run("document.querySelector('#numbers').click()")
    chromium.run("new Promise(done => setTimeout(done, 50))")
    found = chromium.run(CONTRAST)
    assert len(found) > 300
    assert found[0][0] >= 4.5, found[:8]


def test_forced_colours_keep_words_and_verdicts(chromium, shown):
    chromium.open(shown, forced_colors="active")
    assert chromium.run("matchMedia('(forced-colors: active)').matches")
    assert "supported" in chromium.run(VISIBLE)
    shades = chromium.run(
        "[...new Set([...document.querySelectorAll('.example .w')].map(one => getComputedStyle(one).backgroundColor))].length"
    )
    assert shades > 2  # the shades say something, and stay
    quiet(chromium, shown)


def test_every_control_is_reached_by_keyboard(chromium, shown):
    chromium.open(shown)
    chromium.run("document.body.focus()")
    reached = set()
    for _ in range(60):
        chromium.press("Tab", 9)
        reached.add(
            chromium.run(
                "(() => { const one = document.activeElement; return one.id || one.className || one.tagName; })()"
            )
        )
    assert {"skip", "search", "card-0"} <= reached
    unnamed = "[...document.querySelectorAll('input, select, button, svg[role=img]')].filter(one => !(one.labels?.length || one.ariaLabel || one.textContent.trim())).map(one => one.outerHTML.slice(0, 80))"
    assert chromium.run(unnamed) == []
    assert chromium.run(
        "[...document.querySelectorAll('svg')].every(one => one.getAttribute('role') === 'img' && one.ariaLabel.length > 10)"
    )
    chromium.run("document.querySelector('#card-0').focus()")
    chromium.press("ArrowRight", 39)
    assert chromium.run("document.querySelector('#card-1').checked")


@pytest.mark.parametrize("scripts", [True, False])
def test_nothing_is_lost_in_print(chromium, shown, audit, scripts):
    chromium.open(shown, media="print", scripts=scripts)
    if scripts:
        chromium.run("dispatchEvent(new Event('beforeprint'))")
    hidden = "[...document.querySelectorAll('main :is(p, td, th, dd, figure, svg, .w, h2, h3)')].filter(one => !one.closest('.scripted-only, .tokens, noscript') && !one.checkVisibility({contentVisibilityAuto: true})).map(one => one.outerHTML.slice(0, 100))"
    assert chromium.run(hidden) == []
    numbers = chromium.run("[...document.querySelectorAll('.w i')].every(one => one.checkVisibility())")
    assert numbers
    made = chromium.pdf()
    assert made.startswith(b"%PDF")
    if shutil.which("pdftotext"):
        text = subprocess.run(["pdftotext", "-", "-"], input=made, capture_output=True, check=True).stdout.decode()
        for _, one in audit.findings:
            assert f"{one.interval.value:.3f}" in text
    chromium.run("dispatchEvent(new Event('afterprint'))")


def test_texts_of_all_scripts_lay_out(chromium, shown, audit):
    chromium.open(shown)
    chromium.run("document.querySelectorAll('.example').forEach(one => { one.hidden = false; })")
    directions = chromium.run(
        "[...document.querySelectorAll('.example')].map(one => getComputedStyle(one.querySelector('.shaded')).direction)"
    )
    assert directions == ["ltr"] * 3
    widths = chromium.run(
        "[...document.querySelectorAll('.example .w')].every(one => one.getBoundingClientRect().width > 3 && one.getBoundingClientRect().right <= innerWidth)"
    )
    assert widths


@pytest.mark.parametrize("escaped", [True, False])
def test_hostile_texts_are_texts_and_nothing_runs(chromium, audit, tmp_path, monkeypatch, escaped):
    listening = socket.create_server(("127.0.0.1", 0))
    texts = payloads(listening.getsockname()[1])
    assert len(texts) > 200
    if escaped:  # no policy of a page can forbid this one: without escaping it would lead away, though run nothing
        texts.append(f"<meta http-equiv=refresh content='0;url=http://127.0.0.1:{listening.getsockname()[1]}/'>")
    if not escaped:  # the policy alone must hold
        monkeypatch.setattr(regard.report, "TEMPLATES", regard.report.TEMPLATES.overlay(autoescape=False))
    file = tmp_path / "hostile.html"
    file.write_text(page(with_texts(replace(audit, findings=audit.findings[::2]), texts)), "utf-8")
    chromium.open(file, high=1000)
    chromium.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    chromium.run(
        "document.querySelectorAll('a[href^=javascript], button, [onclick], [onmouseover], [tabindex], input').forEach(one => { try { one.focus(); one.click(); one.dispatchEvent(new Event('mouseover')); } catch {} })"
    )
    chromium.run("new Promise(done => setTimeout(done, 300))")
    assert chromium.run("typeof window.ran") == "undefined"
    assert chromium.dialogs == []
    assert [url for url in chromium.outside(file) if url.startswith("http")] == []
    assert select.select([listening], [], [], 0)[0] == []  # nobody called
    listening.close()
    assert chromium.run("location.href") == file.as_uri()
    if escaped:
        quiet(chromium, file)
        shown = chromium.run(
            "document.documentElement.textContent + [...document.querySelectorAll('[title],[aria-label]')].map(one => one.title + one.ariaLabel).join('')"
        )
        missing = [text for text in texts if plain(text) not in shown]
        assert missing == []
        foreign = "[...document.querySelectorAll('img, iframe, object, embed, form, video, audio, base, link, marquee, math, template, plaintext')].length"
        assert chromium.run(foreign) == 0
        attributes = "[...document.querySelectorAll('*')].flatMap(one => one.getAttributeNames()).filter(name => name.startsWith('on') || name === 'style').length"
        assert chromium.run(attributes) == 0
        assert chromium.run("document.querySelectorAll('script').length") == 2
    else:
        injected = chromium.run(
            "[...document.querySelectorAll('script')].filter(one => one.textContent.includes("
            + json.dumps(MARK)
            + ")).length"
        )
        assert injected > 5  # they are there, and did not run
