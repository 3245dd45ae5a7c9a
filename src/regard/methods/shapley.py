"""The mean effect of a word over all orders in which words may be added."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from regard.attention import Trace
from regard.erasing import Rows, Unit, Values, on_units, possible, removable, scores_of, units, without
from regard.errors import OptionError, choose, whole_numbers
from regard.progress import Counter
from regard.types import How, Scores

FAMILY = "reference"
NEEDS = ("reruns",)
CITE = "lundberg2017unified"
FORMULA = "Σ_S |S|!(n−|S|−1)!/n! · (y(S ∪ t) − y(S))"
PASSES = "1 forward; `samples` × (words + 1) forward, or `samples`"
OF = "probability"
FITS = 5  # of the kernel: their spread is the standard error


def shapley(
    trace: Trace, *, algorithm: Literal["sampling", "kernel"] = "sampling", samples: int = 25, how: How | None = None,
    unit: Unit = "word", seed: int = 0,
) -> Scores:  # fmt: skip
    """Shapley values of words, by Captum: ``(example, row)``, signed.

    A coalition is the input without the other words. The tokens of a word share its value; special tokens always take
    part, and score 0. ``facts``: "standard_error" of each score; "evaluations", how many coalitions were run.

    NOTE[DIFF] the kernel is fitted five times, to a fifth of the samples each; the score is the mean.

    Args:
        trace: what was traced, with a target.
        algorithm: "sampling" of orders (Štrumbelj & Kononenko), or "kernel" (KernelSHAP).
        samples: how many orders, each of which takes a run for each word and one more; or how many coalitions the
            kernel is fitted to: five for each word, and five more, at least.
        how: as in `leave_one_out`.
        unit: "word" or "token".
        seed: 0 or more.
    """
    choose("algorithm", algorithm, ("sampling", "kernel"))
    choose("unit", unit, ("word", "token"))
    (samples,), (seed,) = whole_numbers("samples", samples), whole_numbers("seed", seed)
    if samples < 2 or seed < 0:
        raise OptionError(f"samples={samples} must be 2 or more, and seed={seed} 0 or more.")
    how = possible(trace.subject, trace.batch, how)
    values = Values(trace)
    numbers, errors, counts = [], [], []
    with Counter("Shapley values", len(trace.batch)) as counter, torch.random.fork_rng(devices=[]):
        for example, features in enumerate(removable(trace)):
            game = _Game(values, how, example, units(features, unit))
            if game.players:
                torch.default_generator.manual_seed(seed)  # no other: those of GPUs stay as they are
                found = _drawn(game, algorithm, samples)  # sample player
                spread = found.std(0) / len(found) ** 0.5
                numbers += [(example, *pair) for pair in zip(game.players, found.mean(0), strict=True)]
                errors += [(example, *pair) for pair in zip(game.players, spread, strict=True)]
            counts.append(len(game.known))
            counter.advance()
    facts = {"evaluations": torch.tensor(counts)}
    return scores_of(trace, on_units(trace, numbers), facts=facts, errors=on_units(trace, errors))


@dataclass(frozen=True)
class _Game:
    """What coalitions of an example's words are worth; each is run once."""

    values: Values
    how: How
    example: int
    players: list[Rows]
    known: dict[tuple[bool, ...], Tensor] = field(default_factory=dict)

    def __call__(self, coalitions: Tensor) -> Tensor:
        """``(coalition, player)``, 1 where a player takes part, to ``(coalition,)``."""
        lines = [tuple(line) for line in coalitions.bool().tolist()]
        if new := [line for line in dict.fromkeys(lines) if line not in self.known]:
            trace = self.values.trace
            removals = [(self.example, self._absent(line)) for line in new]
            found = without(trace.subject, trace.batch, removals, self.how, self.values.scores)
            self.known.update(zip(new, found, strict=True))
        return torch.stack([self.known[line] for line in lines])

    def _absent(self, present: tuple[bool, ...]) -> Rows:
        return tuple(row for rows, there in zip(self.players, present, strict=True) if not there for row in rows)


def _drawn(worth: _Game, algorithm: str, samples: int) -> Tensor:
    """``(sample, player)``: independent estimates of all Shapley values."""
    from captum.attr import KernelShap, ShapleyValueSampling  # takes 2 seconds

    everyone = torch.ones(1, len(worth.players))
    options = {"baselines": torch.zeros_like(everyone), "perturbations_per_eval": 64}
    if len(worth.players) == 1:
        return (worth(everyone) - worth(1 - everyone))[None].expand(2, 1)
    if algorithm == "sampling":
        one = ShapleyValueSampling(worth)
        return torch.cat([one.attribute(everyone, n_samples=1, **options) for _ in range(samples)])
    if samples < (least := FITS * (len(worth.players) + 1)):
        raise OptionError(
            f"samples={samples} are too few to fit the kernel to {len(worth.players)} features: pass {least} or more."
        )
    fit = KernelShap(worth)
    return torch.cat([fit.attribute(everyone, n_samples=samples // FITS, **options) for _ in range(FITS)])
