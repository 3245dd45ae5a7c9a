"""Does a head look from a pronoun to the one it means?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from regard.aligning import pieces_of, unaligned
from regard.attention import Trace
from regard.data import Example
from regard.errors import NotServed, at_least_one
from regard.glimpses import Array, Survey, halves
from regard.halving import ends, looks_back, over_text, traces, wordless
from regard.probed import Probed, tabled

EACH = "case"
ABOUT = "share of pronouns that look more at the name they mean than at the other"
NEEDS = ("weights", "mentions")
CITE = "webster2018mind"
MENTIONS = ("pronoun", "A", "B")
RULES = ("the nearer name", "the first name", "the longer name")
cannot = wordless


def coreference(survey: Survey, *, least: int = 20) -> Probed:
    """1[Â(pronoun, true name) > Â(pronoun, other name)] of each head, over texts of GAP that mean A or B; a tie is ½.

    Â is the mean over the tokens of the pronoun of the sum over the tokens of the name. Where tokens only see what is
    before them, only texts count in which both names are before the pronoun. Half of the texts, by lot, choose the best
    head; the other half scores it, beside three rules: the nearer name, the one that comes first, the longer one (in
    tokens: a head that looks everywhere alike would find it). The number of each head is of the half that scores.

    A head is called "coreference" if it is better than the rule that is best on the first half, with an interval that
    holds for all heads at a time.

    Args:
        survey: the model, and texts of GAP.
        least: texts that each half must have.
    """
    at_least_one("least", least)
    usable = [place for place, one in enumerate(survey.examples) if one.label in ("A", "B")]
    right = np.full((len(survey.examples), len(survey.index) + len(RULES)), np.nan)  # heads, then rules
    missing, back = 0, False
    for places, examples, seen in traces(survey, usable, "looking from pronouns"):
        spans = [[one.marks["mentions"][name] for name in MENTIONS] for one in examples]
        pieces = pieces_of(seen.batch, [str(one.input) for one in examples], spans)  # example mention row
        missing += int((~pieces.any(-1)).sum())
        back = back or looks_back(seen)
        counts = pieces.any(-1).all(1).numpy() & np.array([not back or _before(one) for one in examples])
        found = np.concatenate([_looks(seen, pieces, examples), _rules(pieces, examples)], 1)
        right[places] = np.where(counts[:, None], found, np.nan)
    warnings = unaligned(missing, 3 * len(usable), "pronouns and names") if usable else ()
    counted = np.isfinite(right[:, -1])
    choose, score = ([place for place in half if counted[place]] for half in halves(survey))
    if min(len(choose), len(score)) < least:
        raise NotServed(
            f"{counted.sum()} of {len(survey.examples)} texts have a pronoun that means A or B"
            f"{' and both names before it' * back}: {len(choose)} to choose a head on and {len(score)} to score it on, "
            f"where least={least}. Pass more texts (examples=None takes all)."
        )
    if back:
        warnings += (
            f"The model looks back only: {counted.sum()} of {len(usable)} texts have both names before the pronoun, "
            "and count.",
        )  # fmt: skip
    rates = np.nan_to_num(right[choose].mean(0), nan=-1.0)
    best, rule = int(rates[: -len(RULES)].argmax()), len(survey.index) + int(rates[-len(RULES) :].argmax())
    scored = np.full_like(right, np.nan)
    scored[score] = right[score]
    drawn = survey.drawn(scored)
    heads = drawn[:, : -len(RULES)]
    low, _ = ends(heads - drawn[:, [rule]], int(np.isfinite(heads[0]).sum()))
    table = _table(survey.index, best, drawn)
    return Probed(
        "coreference", "", tabled(survey.index, heads, ["coreference" if one > 0 else "" for one in low]),
        _sentence(table, len(score)), {"rules": table}, warnings=warnings, drawn=heads,
        settings={"chosen on": len(choose), "scored on": len(score)},
    )  # fmt: skip


def _looks(seen: Trace, pieces: Tensor, examples: Sequence[Example]) -> Array:
    """``(example, head)``: 1 where the true name has more, 0 where the other has, ½ where both have the same."""
    found = []
    sites = {site.index for site in over_text(seen)}
    for site in seen.sites:
        if site.index not in sites:
            found.append(torch.full((len(examples), site.heads), torch.nan))
            continue
        on = pieces.to(site.real.device, site.dtype)
        looks = site.pull(on[:, 0] / on[:, 0].sum(-1, keepdim=True).clamp_min(1), per_head=True)  # example head key
        a, b = torch.einsum("ehk,emk->meh", looks, on[:, 1:])
        found.append((a - b).sign().cpu())
    sign = torch.tensor([[1.0 if one.label == "A" else -1.0] for one in examples])
    return np.asarray(((torch.cat(found, -1) * sign + 1) / 2).double().numpy())


def _rules(pieces: Tensor, examples: Sequence[Example]) -> Array:
    """``(example, rule)``: whether each finds the true name."""
    found = []
    for tokens, one in zip(pieces.sum(-1).tolist(), examples, strict=True):
        at = one.marks["mentions"]
        true, other = ("A", "B") if one.label == "A" else ("B", "A")
        near = {name: max(at[name][0] - at["pronoun"][1], at["pronoun"][0] - at[name][1]) for name in "AB"}
        long = dict(zip("AB", tokens[1:], strict=True))
        found.append([np.sign(near[other] - near[true]), np.sign(at[other][0] - at[true][0]),
                      np.sign(long[true] - long[other])])  # fmt: skip
    return np.asarray((np.array(found, dtype=np.float64) + 1) / 2)


def _before(example: Example) -> bool:
    """Whether both names are before the pronoun."""
    at = example.marks["mentions"]
    return bool(max(at["A"][1], at["B"][1]) <= at["pronoun"][0])


def _table(index: pd.DataFrame, best: int, drawn: Array) -> pd.DataFrame:
    """The best head and the rules, and how far the head is above each of them (intervals for all rules at a time)."""
    head = index.iloc[best]
    names = [f"layer {head['layer']}, head {head['head']}", *RULES]
    one = np.concatenate([drawn[:, [best]], drawn[:, -len(RULES) :]], 1)  # draw who
    low, high = np.quantile(one[1:], [0.025, 0.975], axis=0)
    under, over = ends(one[:, :1] - one, len(RULES))
    return pd.DataFrame({
        "who": names, "accuracy": one[0], "accuracy_low": low, "accuracy_high": high, "difference": one[0, 0] - one[0],
        "difference_low": under, "difference_high": over,
    })  # fmt: skip


def _sentence(table: pd.DataFrame, texts: int) -> str:
    head, *rules = table.to_dict(orient="records")
    said, who = ", ".join(f"{one['who']} {one['accuracy']:.0%}" for one in rules), str(head["who"])
    return (
        f"{who[0].upper()}{who[1:]} looks more at the name that is meant in {head['accuracy']:.0%} of {texts:,} texts "
        f"that it was not chosen on. Rules find it: {said}."
    )
