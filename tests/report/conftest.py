"""An audit of a toy, made once; pages of it; and a browser to look at them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from devtools import Browser
from report_cases import ASKED, METHODS, TEXTS, WORDS, exhibit

import regard
from regard.audited import Audit
from regard.report import page


@pytest.fixture(scope="session")
def audit() -> Audit:
    subject = regard.pooled(regard.models.toys.decisive())
    findings = []
    for name, options in ASKED.items():
        judges = name in ("agreement", "comprehensiveness")
        for title in METHODS if judges else [None]:
            one = regard.trial(subject, TEXTS, name, **({"method": title} if judges else {}), **options)
            findings.append((title, one))
    exhibits, maps = [], {}
    for number, words in enumerate(WORDS):
        one, packed = exhibit(number, words)
        exhibits.append(one)
        maps |= packed
    about = {
        "model": {"class": "Pool", "name": "models/decisive", "weights": "0123"},
        "data": {"source": "data/reviews.csv", "of": 1200, "drawn": "4567"},
        "options": {"methods": {"raw": ["raw", {}]}, "examples": 10, "seed": 0}, "versions": {"regard": "0.1.0"},
        "references": {"jain2019attention": "Jain & Wallace (2019). Attention is not Explanation."}, "kind": "text",
    }  # fmt: skip
    times = {"seconds": 12.5, "command": "regard audit --model models/decisive --data reviews.csv"}
    refused = ({"trial": "plausibility", "method": "raw", "why": "plausibility needs rationales."},)
    return Audit(about, METHODS, tuple(findings), refused, tuple(exhibits), maps, times)


@pytest.fixture(scope="session")
def shown(audit, tmp_path_factory) -> Path:
    """The page, as a file."""
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page(audit), "utf-8")
    return file


@pytest.fixture(scope="session")
def chromium(tmp_path_factory):
    if shutil.which("chromium") is None:
        pytest.skip("chromium is not installed")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
