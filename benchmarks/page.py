"""How large the report of a run is, how long it takes to write, and how soon a browser has drawn it.

    python benchmarks/page.py runs/NAME

"Without examples" leaves out the shaded texts, their heads and the adversarial ones. A load is from the request to the
load event, as Chromium measures it, the best and the worst of five.
"""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/report"))

from devtools import Browser  # type: ignore[import-not-found]

import regard
from regard.report import page

LOADED = "(([one]) => one.loadEventEnd)(performance.getEntriesByType('navigation'))"


def main() -> None:
    audit = regard.load_audit(sys.argv[1])
    bare = replace(
        audit, exhibits=(), maps={}, findings=tuple((title, replace(one, shown=())) for title, one in audit.findings)
    )
    began = time.monotonic()
    written = page(audit)
    took = time.monotonic() - began
    rows = max(len(one.values) for _, one in audit.findings)
    print(f"{len(audit.findings)} findings of {rows} examples, {len(audit.exhibits)} of them shown")
    print(f"{len(written.encode()) / 1000:,.0f} kB; without examples {len(page(bare).encode()) / 1000:,.0f} kB")
    print(f"written in {took:.1f} s")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.html"
        file.write_text(written)
        browser = Browser(Path(folder) / "profile")
        loads = []
        for _ in range(5):
            browser.open(file)
            loads.append(browser.run(LOADED))
        browser.close()
    print(f"loaded in {min(loads) / 1000:.2f} to {max(loads) / 1000:.2f} s")


if __name__ == "__main__":
    main()
