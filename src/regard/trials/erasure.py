"""Take weight after weight off: how soon does the decision flip?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import rankdata
from torch import Tensor

from regard.attending import edited, looks, on_tokens
from regard.attention import Rerun, Site, edits, trace
from regard.attention.editing import Spot
from regard.attention.sites import Part as Tile
from regard.cases import Array, Case, Part
from regard.catalog import found, named
from regard.erasing import units
from regard.errors import NotServed, OptionError, at_least_one
from regard.explaining import traces_for
from regard.finding import Finding, holds, level, said
from regard.measures import bootstrap, jsd
from regard.rationales import ranked

CLAIM = "What attention ranks high decides: without it the decision flips sooner than without features drawn by lot."
REFERENCE = "Random orders of the same features, and orders by the gradient of the decision with respect to attention."
CITE = "serrano2019attention"
CRITERION = "causal"
NEEDS = ("classes",)
OWN = ("attention", "gradient", "attention_gradient")
STEPS = 8  # numbers of erased weights that are tried together, of each order that is not done yet


def erasure(case: Case, *, orders: Sequence[str] = OWN, judged: str = "attention", repeats: int = 5) -> Finding:
    """Zero the readout's weights in the order of a ranking, and renormalise, until the decision flips.

    "attention" is α, "gradient" is ∂p/∂α of the predicted class and "attention_gradient" α·∂p/∂α, all at the edited
    sites. Other names are methods of the catalog; their scores rank with their sign.

    Args:
        case: what is on trial.
        orders: the rankings; random ones are always there.
        judged: the ranking that the claim is about.
        repeats: how many random orders of each example.
    """
    at_least_one("repeats", repeats)
    if isinstance(orders, str) or not isinstance(orders, Sequence):
        raise OptionError(f"orders={orders!r} must be a list of names, such as {[*OWN]}.")
    if judged == "random":
        raise OptionError("judged='random' is what it is held against. Name another order.")
    names = [name for name in dict.fromkeys([judged, *orders]) if name != "random"]
    known = {**found(), **dict.fromkeys(OWN)}  # the paper's gradients are not the methods of that name
    jobs = {name: case.ask(name) for name in names if named("judged" if name == judged else "order", name, known)}

    def work(part: Part) -> dict[str, Any]:
        rerun = part.rerun()
        spots = part.spots(rerun)
        part.notes["edited"] = edited(rerun, spots)
        alpha = looks(part, spots)
        scores = {"attention": alpha}
        if {*names} & {*OWN[1:]}:
            scores |= _slopes(part, spots)
        traces = traces_for([*jobs.values()], part.batch, part.target)
        for name, job in jobs.items():
            numbers = job.method(traces[job.of], **job.options)
            given = numbers.rows if part.batch.source is None else numbers.source
            if given is None:
                raise NotServed(f"erasure: {name} has no scores for the features. Leave it out of orders.")
            scores[name] = on_tokens(part, given)
        ties = [one * 0 for one in alpha]  # which are broken by lot
        lots = [_places(part, ties, f" shuffle {lot}") for lot in range(repeats)]
        places = torch.stack([*(_places(part, scores[name]) for name in names), *lots])  # order example row
        count = np.array([len(one) for one in alpha])
        shares = _until_flipped(part, rerun, spots, places) / np.where(count, count, np.nan)  # order example
        columns: dict[str, Any] = {"features": count}
        for label, some in (*((name, shares[[at]]) for at, name in enumerate(names)), ("random", shares[-repeats:])):
            flips = (~np.isnan(some)).sum(0)
            columns[f"{label}_removed"] = np.nansum(some, 0) / np.where(flips, flips, np.nan)
            columns[f"{label}_never"] = np.where(count, 1 - flips / len(some), np.nan)
        return columns | _single(part, rerun, spots, alpha, lots[0])

    values, failed = case.each("erasing", work)
    spent = {label: _spent(values, label) for label in (*names, "random")}
    sooner = {name: bootstrap(spent["random"] - spent[name], seed=case.seed) for name in names}
    values["sooner"] = spent["random"] - spent[judged]
    table = {
        label: {"never_flipped": float(values[f"{label}_never"].mean())}
        | bootstrap(ours, seed=case.seed).cells("removed")
        | bootstrap(values[f"{label}_removed"], seed=case.seed).cells("removed_if_flipped")
        for label, ours in spent.items()
    }
    margin, by, lot = sooner[judged], table[judged], table["random"]
    single = values[["largest_flips", "other_flips"]]
    sentence = (
        f"By {judged}, {by['removed']:.1%} of the features lost their weight until the decision flipped, in random "
        f"orders {lot['removed']:.1%}: {said(margin)} less, over {margin.n} examples. It never flipped in "
        f"{by['never_flipped']:.1%} and {lot['never_flipped']:.1%} of them, which count as all features. Alone, the "
        "largest weight flips {:.1%} of the decisions, another {:.1%}.".format(*single.mean())
    )
    if min(row["never_flipped"] for row in table.values()) == 1:
        sentence = (
            f"The decision never flipped, in none of {margin.n} examples and by no order, though all features lost "
            "their weight: it does not depend on this attention, so that no order of it can be right or wrong."
        )
    cells = pd.MultiIndex.from_product([(1.0, 0.0), (1.0, 0.0)], names=[*single.columns])
    charts: dict[str, dict[str, Any]] = {
        "how many decisions have flipped": {
            "kind": "cumulative",
            "x": {label: f"{label}_removed" for label in (*names, "random")},
            "caption": "The sooner a curve rises, the sooner its order finds what the decision rests on.",
        },
        "how much sooner": {"kind": "histogram", "x": "sooner", "by": "predicted", "level": 0.0},
        "a single weight": {"kind": "points", "x": "delta_alpha", "y": "delta_js", "by": "predicted", "level": 0.0},
    }
    return Finding(
        "erasure", f"share of features removed until the decision flips, at random minus by {judged}", margin, margin,
        holds(margin), sentence, values,
        reference={"random orders": level(0), **{f"by {name}": sooner[name] for name in names if name != judged}},
        tables={
            "orders": pd.DataFrame(table).T.rename_axis("order").reset_index(),
            "single weights": single.value_counts().reindex(cells, fill_value=0).reset_index(name="examples"),
        },
        charts={
            name: one for name, one in charts.items()
            if one["kind"] == "cumulative" or values[one["x"]].notna().any()
        },
        settings={**values.attrs["notes"]}, failed=failed,
    )  # fmt: skip


def _slopes(part: Part, spots: Sequence[Spot]) -> dict[str, list[Array]]:
    """∂p/∂α of the predicted class, and α·∂p/∂α: the sum over sites, heads and rows that are read."""
    whole = trace(part.case.subject, part.batch, gradients=True, of="probability")

    def total(site: Site, times: bool) -> Tensor:
        def weigh(tile: Tensor, some: Tile) -> Tensor:
            slope = site.gradient(some, tile.shape[-1])
            return tile * slope if times else slope

        return site.pull((whole.readout > 0).to(site.dtype), weigh=weigh) * site.heads  # which takes the heads' mean

    sites = [whole.sites[spot.index] for spot in spots]
    sums = (torch.stack([total(site, times) for site in sites]).sum(0) for times in (False, True))
    return dict(zip(OWN[1:], (on_tokens(part, one) for one in sums), strict=True))


def _places(part: Part, scores: Sequence[Array], lot: str = "") -> Tensor:
    """``(example, row)``: as which a row is erased, from 1 on; inf: never."""
    places = torch.full_like((part.batch.source or part.batch).real, torch.inf, dtype=torch.float32)
    for example, (numbers, name) in enumerate(zip(scores, part.ids, strict=True)):
        order = ranked(rankdata(numbers), name + lot, part.case.seed)  # by rank, since `ranked` goes by size
        rows = [row for (row,) in units(part.features[example], "token")]
        places[example, [rows[at] for at in order]] = torch.arange(1.0, len(rows) + 1).to(places)
    return places


def _until_flipped(part: Part, rerun: Rerun, spots: Sequence[Spot], places: Tensor) -> Array:
    """``(order, example)``: how many weights go until the decision flips; NaN where it never does."""
    before = part.decisions(rerun.output[None])
    needed = np.full(places.shape[:2], np.nan)
    most = places.where(places.isfinite(), 0).amax((0, 2)).numpy(force=True)  # of each example: all of its features
    done = 0
    while (going := np.flatnonzero((np.isnan(needed) & (most > done)).any(1))).size:
        steps = torch.arange(done + 1, min(done + STEPS, int(most.max())) + 1, device=places.device)
        gone = places[going, None] <= steps[:, None, None]  # order step example row
        zeroed = edits.zero(gone.flatten(0, 1), sites=[spot.index for spot in spots])
        flipped = part.decisions(rerun(zeroed, variants=len(going) * len(steps))) != before
        flipped = flipped.reshape(len(going), len(steps), -1)
        new = flipped.any(1) & np.isnan(needed[going])
        needed[going] = np.where(new, done + 1 + flipped.argmax(1), needed[going])
        done += STEPS
    return needed


def _single(part: Part, rerun: Rerun, spots: Sequence[Spot], alpha: Sequence[Array], lots: Tensor) -> dict[str, Array]:
    """One weight alone is erased, the largest or that of another feature drawn by lot; NaN where there is no other."""
    largest = _places(part, alpha) == 1
    others = lots.masked_fill(largest, torch.inf)
    gone = torch.stack([largest, (others == others.amin(-1, keepdim=True)) & others.isfinite()])  # which example row
    outputs = rerun(edits.zero(gone, sites=[spot.index for spot in spots]), variants=2)
    flips = part.decisions(outputs) != part.decisions(rerun.output[None])
    apart = jsd(*(part.probabilities(one).double().numpy(force=True) for one in (rerun.output[None], outputs)))
    marks = zip(*(on_tokens(part, one) for one in gone), alpha, strict=True)
    cells = {
        "largest_flips": flips[0], "other_flips": flips[1], "delta_js": apart[0] - apart[1],
        "delta_alpha": np.array([(one - other) @ weights for one, other, weights in marks]),
    }  # fmt: skip
    return {name: np.where(gone[1].any(-1).numpy(force=True), one, np.nan) for name, one in cells.items()}


def _spent(values: pd.DataFrame, label: str) -> pd.Series[float]:
    """Of each example the share of features that are removed until the decision flips.

    NOTE[DIFF] the authors leave out what never flips, under each order other examples (under random ones those that the
    reverse of attention does not flip): an order that flips only what is easy looks good. Here it counts as 1, all
    removed, as in Mohankumar et al. (2020). The table of orders has both means.
    """
    never = values[f"{label}_never"]
    return values[f"{label}_removed"].fillna(0) * (1 - never) + never
