"""Train a model to hide what it looks at: could someone have hidden this from an audit?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd

from regard.cases import Array, Case
from regard.errors import InputError, NotServed, OptionError, choose, within
from regard.finding import Finding, above, holds, level, said
from regard.lessons import Lab, losses_of
from regard.measures import Interval, crossed
from regard.teaching import Lesson, Taught

CLAIM = "Attention cannot be hidden: a model whose attention is trained off the words that it needs becomes worse."
REFERENCE = "A loss of accuracy that counts as none, and that of a model which never sees these words."
CITE = "pruthi2020learning"
CRITERION = ""
NEEDS = ("recipe", "labels")
LAMBDAS = (0.0, 0.1, 1.0)
LEFT = 0.1  # share of the attention mass, above which it was not hidden


def deceive(
    case: Case, *, mask: Sequence[str] | Callable[[str], bool] | str | None = None,
    lambdas: Sequence[float] = LAMBDAS, heads: Literal["mean", "max"] = "mean", seeds: int = 3, tolerance: float = 0.02,
) -> Finding:  # fmt: skip
    """Accuracy, and attention on impermissible words, of models with the loss L − λ log(1 − αᵀm).

    α is that of the rows which are read, at the last site unless others are named; special tokens have their share.
    Of models that write sequences (`regard.recipes.sequences`) the aligned word of the source is impermissible.

    NOTE[DIFF] for BERT the authors also block what flows between impermissible words and others in all layers; here
    nothing is blocked, and attention of earlier layers is free to carry it.

    Args:
        case: what is on trial.
        mask: what is impermissible: a list of words (columns), "rationale" (what the data marks in that column), or a
            function from a word to True or False.
        lambdas: the grid; 0, where nothing is hidden, is always part of it.
        heads: "mean": the mass of the mean over heads is punished; "max": that of the head with most.
        seeds: how many models for each λ.
        tolerance: a loss of accuracy that counts as none.
    """
    lab = case.lab
    choose("heads", heads, ("mean", "max"))
    within("tolerance", tolerance, 0, 1, ends="[)")
    grid = sorted({0.0, *(within("lambdas", one, 0, float("inf"), ends="[)") for one in lambdas)})
    if len(grid) < 2:
        raise OptionError(f"lambdas={lambdas!r} must name one above 0 at least: with 0 nothing is hidden.")
    knows = hasattr(lab.untrained, "aligned")
    lab.must_have(seeds, outputs=False, words=not knows)
    meant = () if knows else _checked(lab, mask)
    sites, places = lab.places(case.sites)
    plain = lab.plain(seeds)
    options = {"sites": sites, "mask": meant, "heads": heads}
    hidden = [
        Lesson("deceive", one.seed, options | {"factor": factor}) for factor in grid[1:] for one in plain
    ]  # fmt: skip
    gone = [] if knows else [Lesson("without", one.seed, {"mask": meant}) for one in plain]
    results = lab.results([*plain, *hidden, *gone], "training models that hide")
    lab.sound(results[:seeds])
    flags = {split: None if knows else lab.flags(meant, split) for split in ("dev", "test")}
    by = {0.0: results[:seeds]} | {
        factor: [one for one in results if one.lesson.options.get("factor") == factor and not one.diverged]
        for factor in grid[1:]
    }
    by = {factor: some for factor, some in by.items() if some}
    right = {factor: np.stack([lab.fits(one) for one in some]) for factor, some in by.items()}
    mass = {factor: np.stack([_mass(one, flags, "test", places, heads) for one in some]) for factor, some in by.items()}
    rows = [
        {"λ": f"{factor:g}", **crossed(right[factor], seed=case.seed).cells("score"),
         **crossed(mass[factor], seed=case.seed).cells("mass"), "models": len(by[factor])}
        for factor in by
    ]  # fmt: skip
    best = min(  # chosen by development, judged by test
        by, key=lambda factor: np.mean([_mass(one, flags, "dev", places, heads).mean() for one in by[factor]])
    )
    pairs = [(one.lesson.seed - lab.seed, place) for place, one in enumerate(by[best])]  # some may have diverged
    lost = crossed(np.stack([right[0.0][plain] - right[best][hid] for plain, hid in pairs]), seed=case.seed)
    before, after = (crossed(mass[factor], seed=case.seed) for factor in (0.0, best))
    reference: dict[str, Interval] = {"counts as none": level(tolerance)}
    needed: bool | None = True
    blinded: list[dict[str, Any]] = []
    if gone:
        blind = np.stack([lab.fits(one) for one in lab.sound(results[-seeds:])])
        never = crossed(right[0.0] - blind, seed=case.seed)
        reference["never sees them"] = never
        needed = never.low > tolerance
        needed = None if never.low <= tolerance < never.high else needed
        blinded = [{"score of": "models that never see them", **crossed(blind, seed=case.seed).cells("score")}]
    margin = above(lost, tolerance)
    hides = best > 0 and after.value <= LEFT * before.value
    judged = holds(margin) if needed else None
    supported = judged if judged or hides else None  # that nothing is lost means something only where it was hidden
    diverged = [one for one in results if one.diverged]
    sentence = _sentence(lab, best, lost, before, after, reference, needed, hides)
    values = lab.rows(results[0]).assign(
        **{f"right λ={factor:g}": one.mean(0) for factor, one in right.items()},
        **{f"mass λ={factor:g}": one.mean(0) for factor, one in mass.items()},
    )  # fmt: skip
    return Finding(
        "deceive", f"{lab.score} lost by hiding", lost, margin, supported, sentence, values,
        reference=reference,
        tables={"hidden": pd.DataFrame(rows), "losses": losses_of(results[seeds : seeds + len(hidden)], "factor", "λ")}
        | ({"without these words": pd.DataFrame(blinded)} if blinded else {}),
        charts={
            lab.score: {"kind": "lines", "table": "hidden", "x": "λ", "y": "score", "caption": f"Test {lab.score}."},
            "attention mass": {"kind": "lines", "table": "hidden", "x": "λ", "y": "mass",
                               "caption": "How much of attention is on what is impermissible."},
        },
        settings={"sites": case.sites, "mask": getattr(meant, "__qualname__", meant)},
        settles=False,
        warnings=tuple(f"λ = {one.lesson.options['factor']:g}, seed {one.lesson.seed}: {one.diverged}"
                       for one in diverged),
    )  # fmt: skip


def _checked(lab: Lab, mask: Any) -> Any:
    """The mask, if it covers something and not everything."""
    if mask is None:
        raise NotServed(
            "deceive needs to know which words are impermissible: mask=, a list of words, 'rationale', or a function; "
            'on the command line --option \'mask=["he","she"]\', or --trials \'deceive:mask=["he","she"]\'.'
        )
    if isinstance(mask, str) and mask != "rationale":
        raise OptionError(f"mask={mask!r}: pass a list of words, 'rationale', or a function. One word is [{mask!r}].")
    meant = mask if isinstance(mask, str) or callable(mask) else tuple(str(word) for word in mask)
    for split in ("train", "test"):
        flags = lab.flags(meant, split)
        covered, every = sum(int(one.sum()) for one in flags), sum(len(one) for one in flags)
        what = mask if isinstance(mask, str) or callable(mask) else [*meant[:5], *["…"] * (len(meant) > 5)]
        if not covered:
            raise InputError(f"mask={what!r} covers nothing: none of {every:,} words in {split} is impermissible.")
        if covered == every:
            raise InputError(f"mask={what!r} covers everything: attention would have nowhere to go ({split}).")
    return meant


def _mass(one: Taught, flags: Mapping[str, Any], split: str, places: Sequence[int], heads: str) -> Array:
    """``(example,)``: the attention on what is impermissible, mean over sites; heads: their mean, or the most."""
    marked = flags[split]
    if marked is None:
        return np.asarray(one.arrays[f"{split}/mass"][:, list(places)].mean(1), dtype=np.float64)  # example site
    if heads == "max":
        maps = [one.heads(place, split) for place in places]
        most = [[some[:, flag].sum(-1).max() for some, flag in zip(of, marked, strict=True)] for of in maps]
        return np.asarray(np.mean(most, 0), dtype=np.float64)
    means = one.raw(places, split)
    return np.array([float(some[:, flag].sum(-1).mean()) for some, flag in zip(means, marked, strict=True)])


def _sentence(
    lab: Lab, best: float, lost: Interval, before: Interval, after: Interval, reference: dict[str, Interval],
    needed: bool | None, hides: bool,
) -> str:  # fmt: skip
    text = (
        f"Trained to hide (λ = {best:g}), models have {said(after)} of their attention on what is impermissible, "
        f"instead of {said(before)}, and lose {said(lost)} of {lab.score}. "
    )
    if "never sees them" in reference:
        text += f"Without these words at all they lose {said(reference['never sees them'])}. "
    if needed is None:
        return text + "Whether the task needs them these models do not tell: try more seeds, or more data."
    if not needed:
        return text + "So the task can be done without them, and to hide them means nothing."
    tolerated = reference["counts as none"].value
    if not hides and lost.low <= tolerated:
        return text + f"That is more than {LEFT:.0%} of what it was, and not hidden: try larger lambdas."
    if lost.high < tolerated:
        return text + "So attention can hide what a model uses: somebody could have hidden this from an audit."
    if lost.low > tolerated:
        return text + "So hiding is paid for."
    return text + f"Whether that is more than {tolerated:g} these do not tell: try more seeds, or more data."
