"""Heads that look at a fixed distance: against loops over the models' weights, and on heads that were made so."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.probes.positional import OFFSETS, PARTS, settle

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "methods")]
from handmade import handmade  # noqa: E402
from oracles import bert, classified, continued, llama  # noqa: E402

TEXTS = ["a moving film, and dull .", "so", "so so", "dull, and it never ends: an unbelievably overlong film !"]


def literal(weights, special):
    """``(head, offset)`` of one site of one text: the share of rows whose largest weight is so far behind."""
    size, found = len(special), []
    for head in weights.numpy():
        shares = []
        for offset in OFFSETS:
            hits = []
            for query in range(size):
                wanted = query + offset
                if special[query] or not 0 <= wanted < size or special[wanted]:
                    continue
                best = max((key for key in range(size) if not special[key]), key=lambda key: head[query, key])
                hits.append(best == wanted)
            shares.append(np.mean(hits) if hits else np.nan)
        found.append(shares)
    return found


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_shares_literally(tokenizer, kind):
    model = bert(tokenizer) if kind == "encoder" else llama(tokenizer)
    subject = regard.text(model, tokenizer) if kind == "encoder" else regard.causal(model, tokenizer)
    texts = []
    for text in TEXTS:
        special = [token in tokenizer.all_special_ids for token in tokenizer(text)["input_ids"]]
        run = (classified if kind == "encoder" else continued)(model, tokenizer, text)
        texts.append([shares for site in run.weights for shares in literal(site, special)])
    wanted = np.array(texts)
    assert np.isnan(wanted).any(), "the text of one word has no neighbours"
    found = regard.heads(subject, TEXTS, probes="positional", draws=5)["positional"]
    parts = found.tables["parts"][[*PARTS]].to_numpy()
    np.testing.assert_allclose(parts, np.nanmean(wanted, 0), rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.values["value"], np.nanmean(wanted, 0).max(1), rtol=0, atol=1e-12)


def test_heads_at_a_fixed_distance_are_found_and_no_others(tokenizer):
    # what looks at [CLS] or [SEP] most of all is called after where it looks among words
    rules = {
        "previous": lambda q, k, n: k == (q - 1).clamp_min(0),
        "next": lambda q, k, n: k == (q + 1).clamp_max(n - 1),
        "self": lambda q, k, n: k == q,
        "2 before": lambda q, k, n: k == (q - 2).clamp_min(0),
        "2 after": lambda q, k, n: k == (q + 2).clamp_max(n - 1),
        "": lambda q, k, n: k == 4 + 0 * q,
    }
    subject = handmade(tokenizer, [*rules.values()])
    said = ["a film that never ends at all it is", "one more time and then it is all over for them"]
    found = regard.heads(subject, said, probes="positional", batch_size=1, draws=5)["positional"]
    assert found.values["label"].tolist() == [*rules]
    np.testing.assert_allclose(found.values["value"][:5], 1)
    assert found.values["value"][5] < 0.3


def test_nine_tenths_are_a_rule_and_less_is_none():
    means = np.full((3, len(OFFSETS), 3), 0.0)
    means[:, 1] = [[0.9, 0.899, np.nan]] * 3
    means[1, 3, 0] = 1.0  # of draws it is always the distance of what was seen
    means[:, :, 2] = np.nan
    values, labels = settle(means, np.zeros(3))
    assert labels == ["previous", "", ""]
    np.testing.assert_array_equal(values, [[0.9, 0.899, np.nan]] * 3)
