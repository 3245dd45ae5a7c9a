"""Where is a fact recalled?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from regard.attention import Rerun, Trace, trace
from regard.attention.edits import state
from regard.attention.outlets import layout_of
from regard.attention.state_edits import At, StatePlace
from regard.cases import FEW
from regard.errors import NotServed, OptionError, at_least_one, choose
from regard.facts import knows, speechless, subject_rows
from regard.glimpses import Array, Survey
from regard.probed import Probed
from regard.progress import Counter
from regard.types import Batch

EACH = "case"
ABOUT = "how much of a fact comes back when one state is restored"
NEEDS = ("reruns", "states", "facts", "tokens")
CITE = "meng2022locating"
Kind = Literal["state", "mlp", "attention"]
KINDS: tuple[Kind, ...] = ("state", "mlp", "attention")
OUTLETS: dict[str, At] = {"state": "block", "mlp": "mlp", "attention": "attention"}
NAMES = {"state": "one state", "mlp": "MLP outputs", "attention": "attention outputs"}
ROLES = ("first subject", "middle subject", "last subject", "first after", "further", "last")
SIGMAS = 3  # of the embeddings of all subjects
WINDOW = 10  # layers


def cannot(subject: Any, seen: Trace) -> str | None:
    """It takes a model that goes on with a text, and whose blocks have states."""
    why = speechless(subject, seen) or layout_of(subject, seen.batch)[0, "block"]
    return why if isinstance(why, str) else None


def causal_tracing(
    survey: Survey,
    *,
    noises: int = 10,
    window: int | None = None,
    every: int = 1,
    kinds: Kind | Sequence[Kind] = KINDS,
) -> Probed:
    """Indirect effects (Meng et al. 2022): p(answer) with a state restored − p(answer) with a corrupted subject.

    The embeddings of the subject's tokens get noise N(0, (3σ)²), σ the standard deviation of all numbers in the
    embeddings of all subjects. In each corrupted run the state of one token after one block is set to what it was in
    the clean run ("state"), or what the MLPs, or attention, of a window of layers add to that token: the layers
    [l − w/2, l + w/2) around layer l. Means over ``noises`` runs, then over the facts that the model knows: what it
    says begins with the answer. p is that of the answer's first token.

    NOTE[DIFF] Of the middle tokens of a subject, and of those further on, one is drawn for each fact, to save time; the
    authors' code averages over all. Noise comes from another generator than theirs. Embeddings are those of the
    subjects' tokens as they are in the prompts, where theirs are of subjects alone.

    Args:
        survey: a decoder, and facts.
        noises: corrupted runs of each fact; the same noise for all facts and states.
        window: layers whose outputs are restored together, around each layer, cut off at the ends; None: 10 as in the
            paper, or a third of the layers where that is less.
        every: trace each layer, or each second one, and so on.
        kinds: what is restored: "state", "mlp", "attention".
    """
    noises, every = at_least_one("noises", noises), at_least_one("every", every)
    named = [choose("kinds", one, KINDS) for one in ([kinds] if isinstance(kinds, str) else dict.fromkeys(kinds))]
    if not named:
        raise OptionError(f"kinds={kinds!r} is empty. Name some of {', '.join(KINDS)}.")
    window = None if window is None else at_least_one("window", window)
    facts, sigma = _known(survey)
    layout = layout_of(survey.subject, facts[0].batch)
    depth = 1 + max(layer for layer, _ in layout)
    wide = min(WINDOW, max(1, depth // 3)) if window is None else window
    missing = {at: why for (_, at), why in layout.items() if isinstance(why, str)}
    lacking = {one: missing[OUTLETS[one]] for one in named if OUTLETS[one] in missing}
    served = [one for one in named if one not in lacking]
    if not served:
        raise NotServed(" ".join(f"{one}: {why}" for one, why in lacking.items()))
    layers = range(0, depth, every)
    windows = {one: [_around(layer, 1 if one == "state" else wide, depth) for layer in layers] for one in served}
    p, effects = [], []
    with Counter("tracing facts", len(facts)) as counter:
        for fact in facts:
            run = _Corrupted(survey, fact, SIGMAS * sigma, noises, [OUTLETS[one] for one in served])
            p.append([run.clean, run.corrupted, run.clean - run.corrupted])
            effects.append(run.effects(windows))
            counter.advance()
    tables = _tables(survey, served, layers, np.stack(effects))
    total = _total(survey, np.array(p))
    told = pd.DataFrame(p, columns=["clean", "corrupted", "total effect"]).assign(fact=[one.name for one in facts])
    warnings = (
        *((f"There are only {len(facts)} facts: intervals are hardly ones.",) if len(facts) < FEW else ()),
        *(f"{one}: {why}" for one, why in lacking.items()),
    )
    return Probed(
        "causal_tracing", "", pd.DataFrame(), _sentence(tables, total, len(facts), len(survey.examples)),
        {**tables, "total": total, "facts": told}, {f"effect of {NAMES[one]}": _chart(one, wide) for one in served},
        {"window": wide, "sigma": sigma, "known": len(facts), "facts": len(survey.examples)}, warnings,
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Fact:
    """A fact that the model knows: its prompt alone, the rows of its subject, its token, and a row for each role."""

    name: str
    batch: Batch
    rows: list[int]
    answer: int
    roles: list[int | None]


def _known(survey: Survey) -> tuple[list[_Fact], float]:
    """The facts that the model knows, and σ over the subjects of all."""
    known: dict[int, int] = {}
    vectors: list[Tensor] = []
    for places, batch in survey.batches("asking for facts"):
        seen = trace(survey.subject, batch, states="entrance")
        entered = seen.state("rows", "entrance")
        for at, place in enumerate(places):
            example = survey.examples[place]
            vectors.append(entered[at, subject_rows(batch.features[at], example)].flatten())
            if knows(survey.subject, example, seen.output[at]):
                known[place] = int(seen.output[at].argmax())
    if not known:
        raise NotServed(
            f"the model knows none of the {len(survey.examples)} facts: what it says begins with no answer. Pass other "
            "facts, or more (examples=None takes all)."
        )
    facts = []
    for place, answer in sorted(known.items()):
        example = survey.examples[place]
        batch = survey.subject.encode([example.input])
        rows = subject_rows(batch.features[0], example)
        roles = roles_of(rows, batch.real.shape[1], np.random.default_rng((survey.seed, place)))
        facts.append(_Fact(example.id or str(place), batch, rows, answer, roles))
    return facts, float(torch.cat(vectors).std())


def roles_of(rows: Sequence[int], size: int, lots: np.random.Generator) -> list[int | None]:
    """The row of each role; None: there is none. One token may have several, as in the authors' code."""
    after = range(rows[-1] + 1, size)
    between, further = rows[1:-1], after[1:-1]
    return [
        rows[0], int(lots.choice(between)) if between else None, rows[-1],
        after[0] if after else None, int(lots.choice(further)) if further else None, size - 1,
    ]  # fmt: skip


def _around(layer: int, window: int, depth: int) -> range:
    """[layer − w/2, layer + w/2), cut off at the ends."""
    return range(max(0, layer - math.floor(window / 2)), min(depth, layer + math.ceil(window / 2)))


class _Corrupted:
    """One fact: a clean run, runs with noise on its subject, and these with something restored.

    Variants are numbered ``place of the restored row · noises + noise``.
    """

    def __init__(self, survey: Survey, fact: _Fact, size: float, noises: int, outlets: Sequence[At]) -> None:
        self.fact, self.size, self.noises, self.seed = fact, size, noises, survey.seed
        self.seen = trace(survey.subject, fact.batch, states=outlets)
        self.rerun = Rerun(survey.subject, fact.batch)
        self.noisy = state(self._corrupt, at="entrance")
        self.held: dict[tuple[int | None, int], Tensor] = {}  # by layer and noise: states (row, channel) after blocks
        self.clean = float(self._p(self.seen.output))
        self.corrupted = float(self._p(self.rerun([self.noisy, state(self._hold)], variants=noises)).mean())

    def effects(self, windows: dict[str, list[range]]) -> Array:
        """``(kind, role, layer)``: what p(answer) gains; NaN: the prompt has no token of that role."""
        rows = sorted({row for row in self.fact.roles if row is not None})
        found = [[self._restored(OUTLETS[kind], some, rows) for some in listed] for kind, listed in windows.items()]
        gained = np.array(found) - self.corrupted  # kind layer row
        missing = np.full(gained.shape[:2], np.nan)
        every = [missing if row is None else gained[..., rows.index(row)] for row in self.fact.roles]
        return np.stack(every, 1)

    def _restored(self, at: At, layers: range, rows: list[int]) -> Array:
        """``(row,)``: p(answer) where what comes out of some layers at that row is as in the clean run."""
        where = torch.tensor(rows, device=self.seen.real.device)

        def restore(found: Tensor, place: StatePlace) -> Tensor:
            assert place.layer is not None
            number = torch.tensor(place.variants, device=found.device)
            row = where[number // self.noises]
            found[torch.arange(len(row)), 0, row] = self.seen.state(place.layer, at)[0, row].to(found)
            return found

        # up to the first of these layers all is as in the corrupted run: its states are put there, and it is not rerun
        before = state(self._put, layers=layers[0] - 1) if layers[0] else self.noisy
        output = self.rerun([before, state(restore, at=at, layers=layers)], variants=len(rows) * self.noises)
        return np.asarray(self._p(output).view(len(rows), self.noises).mean(1).double().numpy(force=True))

    def _corrupt(self, found: Tensor, place: StatePlace) -> Tensor:
        rows = self.fact.rows
        lots = np.random.default_rng(self.seed)  # the same for each fact and state, as in the authors' code
        noise = self.size * lots.standard_normal((self.noises, len(rows), found.shape[-1]))
        found[:, 0, rows] += torch.from_numpy(noise).to(found)[[number % self.noises for number in place.variants]]
        return found

    def _hold(self, found: Tensor, place: StatePlace) -> Tensor:
        self.held |= {(place.layer, number): one for number, one in zip(place.variants, found[:, 0], strict=True)}
        return found

    def _put(self, found: Tensor, place: StatePlace) -> Tensor:
        return torch.stack([self.held[place.layer, number % self.noises] for number in place.variants])[:, None]

    def _p(self, output: Tensor) -> Tensor:
        return output.softmax(-1)[..., self.fact.answer]


def _tables(survey: Survey, kinds: Sequence[str], layers: Sequence[int], effects: Array) -> dict[str, pd.DataFrame]:
    """By kind a row for each role and layer; of effects ``(fact, kind, role, layer)``."""
    drawn = survey.drawn(effects)
    low, high = np.quantile(drawn[1:], [0.025, 0.975], axis=0)
    counts = np.isfinite(effects[:, 0, :, 0]).sum(0)  # role
    return {
        kind: pd.DataFrame([
            {
                "role": role, "layer": layer, "effect": drawn[0, k, r, at], "effect_low": low[k, r, at],
                "effect_high": high[k, r, at], "facts": int(counts[r]),
            }
            for r, role in enumerate(ROLES) for at, layer in enumerate(layers) if counts[r]
        ])
        for k, kind in enumerate(kinds)
    }  # fmt: skip


def _total(survey: Survey, p: Array) -> pd.DataFrame:
    """What noise does: means of ``(fact, 3)``."""
    drawn = survey.drawn(p)
    low, high = np.quantile(drawn[1:], [0.025, 0.975], axis=0)
    of = ["clean", "corrupted", "total effect"]
    return pd.DataFrame({"of": of, "p": drawn[0], "p_low": low, "p_high": high, "facts": len(p)})


def _chart(kind: str, window: int) -> dict[str, Any]:
    what = "the state of a token after this layer is" if kind == "state" else (
        f"{NAMES[kind]} at a token, in {window} layers around this one, are"
    )  # fmt: skip
    return {
        "kind": "lines", "table": kind, "x": "layer", "y": "effect", "by": "role", "level": 0.0,
        "caption": f"What p(answer) gains when {what} restored in a run with a corrupted subject; 95 % over facts.",
    }  # fmt: skip


def _sentence(tables: dict[str, pd.DataFrame], total: pd.DataFrame, known: int, asked: int) -> str:
    peaks = []
    for kind, table in tables.items():
        best = table.iloc[table["effect"].to_numpy().argmax()]
        peaks.append(
            f"{NAMES[kind]}: {best['effect']:.3f} [{best['effect_low']:.3f}, {best['effect_high']:.3f}] at the "
            f"{best['role']} token, layer {best['layer']}"
        )
    clean, corrupted, _ = total["p"]
    return (
        f"The model knows {known} of {asked} facts. Noise on the subject takes p(answer) from {clean:.3f} to "
        f"{corrupted:.3f}; restoring gives back at most, by {'; by '.join(peaks)}."
    )
