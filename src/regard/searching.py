"""The search for other attention that gives the same output, example by example (Jain & Wallace 2019)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.attending import edited, removed
from regard.attention import Rerun, edits
from regard.attention.edits import Place
from regard.cases import Part
from regard.errors import NoGradient, OptionError
from regard.measures import jsd
from regard.progress import Counter

TINY = 1e-10  # inside the search's logarithms, as in the authors' code
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Search:
    """Looks for the farthest attention that keeps the output; arguments as in the trial `adversarial`."""

    k: int = 5
    steps: int = 500
    epsilon: float = 0.05
    epsilon_search: float = 0.01
    penalty: float = 500.0
    learning_rate: float = 0.01
    spread: float = 3.0
    heads: Literal["free", "shared"] = "free"

    def __call__(self, part: Part) -> dict[str, Sequence[Any]]:
        """Of each example of a batch how far the farthest is, how far it moves the output, and what it looks like."""
        least = max(1e-6, 4 * torch.finfo(part.trace.output.dtype).eps)
        if self.epsilon < least:
            raise OptionError(
                f"epsilon={self.epsilon!r} is below what this model's numbers resolve. Pass {least:.0e} or more."
            )
        rerun = part.rerun(gradients="edits")
        spots = part.spots(rerun)
        part.notes["edited"] = edited(rerun, spots)
        rooms = _rooms(rerun, [spot.index for spot in spots])
        logits = [room.start(part, self.k, self.spread, shared=self.heads == "shared") for room in rooms]
        _must_depend(part, rerun, rooms, logits)
        optimiser = torch.optim.Adam(logits, lr=self.learning_rate, amsgrad=True)
        with Counter("steps of the search", self.steps) as counter:
            for _ in range(self.steps):
                with torch.enable_grad():
                    weights = [room.put(one) for room, one in zip(rooms, logits, strict=True)]
                    apart = sum(room.apart(one).sum() for room, one in zip(rooms, weights, strict=True)) / len(rooms)
                    far = (_moved(part, rerun, rooms, weights) - self.epsilon_search).relu()
                    gradients = torch.autograd.grad(self.penalty * far.sum() - apart, logits)
                for one, gradient in zip(logits, gradients, strict=True):
                    one.grad = gradient
                optimiser.step()
                counter.advance()
        with torch.no_grad():
            weights = [room.put(one) for room, one in zip(rooms, logits, strict=True)]
            moved = _moved(part, rerun, rooms, weights).double().numpy(force=True)
        columns, maps = _farthest(part, rooms, weights, moved, self.epsilon)
        return columns | {"removed": removed(part, rerun, spots), "shown": maps}


@dataclass(frozen=True, eq=False)
class Room:
    """What adversaries have to move in at one site.

    Args:
        site: its number.
        weights: the observed ones, ``(example, head, row, key)``.
        moves: of the same shape, True at features that the mask lets a row see; the rest keeps its weight.
        read: ``(example, row)``: the readout r.
    """

    site: int
    weights: Tensor
    moves: Tensor
    read: Tensor

    @cached_property
    def mass(self) -> Tensor:
        """``(example, head, row, 1)``: what there is to move."""
        return (self.weights * self.moves).sum(-1, keepdim=True)

    @property
    def free(self) -> NDArray[np.bool_]:
        """``(example,)``: whether there is any other attention; with one word there is none."""
        several = (self.moves.sum(-1) > 1) & (self.mass[..., 0] > 0)
        return np.asarray((several.any(1) & (self.read > 0)).any(-1).numpy(force=True))

    def start(self, part: Part, k: int, spread: float, *, shared: bool) -> Tensor:
        """Logits ``(adversary, example, head, row, key)``, drawn for each example by its name.

        The authors add them to the logarithm of a uniform distribution, which a softmax does not notice.
        """
        example, head, row, key = self.weights.shape
        logits = torch.zeros(k, example, 1 if shared else head, row, key, dtype=self.weights.dtype)
        moves = (self.moves.any(1) & (self.read > 0)[..., None]).cpu()  # example row key: not of padding
        for place, name in enumerate(part.ids):
            lots = np.random.default_rng([part.case.seed, zlib.crc32(name.encode(errors="surrogatepass")), self.site])
            drawn = lots.standard_normal((k, logits.shape[2], int(moves[place].sum())))
            logits[:, place][..., moves[place]] = spread * torch.from_numpy(drawn).to(logits)
        return logits.to(self.weights.device).requires_grad_()

    def put(self, logits: Tensor) -> Tensor:
        """Adversaries: ``(adversary, example, head, row, key)``."""
        other = logits.masked_fill(~self.moves, torch.finfo(logits.dtype).min).softmax(-1)
        return torch.where(self.moves, self.mass * other, self.weights)

    def map(self, weights: Tensor, *, per_head: bool = False) -> Tensor:
        """``(…, example, row, key)``: what an explanation shows, the mean over heads; over features it sums to 1."""
        some = weights * self.moves
        some = some if per_head else some.mean(-3)
        total, least = some.sum(-1, keepdim=True), torch.finfo(some.dtype).tiny
        return torch.where(total > least, some / total.clamp_min(least), 1 / some.shape[-1])  # without any: the same

    def apart(self, weights: Tensor) -> Tensor:
        """``(example,)``: Σ_i JSD(α_i, α) + 1/k² Σ_ij JSD(α_i, α_j)."""
        maps = torch.cat([self.map(self.weights)[None], self.map(weights)])  # α and its adversaries, example row key
        one, other = torch.triu_indices(len(maps), len(maps), 1, device=maps.device)
        middle, own = _entropy((maps[one] + maps[other]) / 2), _entropy(maps)
        divergence = middle - (own[one] + own[other]) / 2  # pair example row
        counts = torch.where(one == 0, 1.0, 2 / len(weights) ** 2).to(maps)
        return (counts[:, None, None] * divergence * self.read).sum((0, -1))

    def divergence(self, weights: Tensor, *, per_head: bool = False) -> Array:
        """``(…, example)``: JSD from the observed weights, without what the search adds inside logarithms."""
        exact = jsd(*(_numbers(self.map(one, per_head=per_head)) for one in (self.weights, weights)))
        return np.asarray(((exact.mean(-2) if per_head else exact) * _numbers(self.read)).sum(-1))


def _entropy(p: Tensor) -> Tensor:
    return -(p * (p + TINY).log()).sum(-1)


def _numbers(x: Tensor) -> Array:
    return np.asarray(x.double().numpy(force=True))


def _rooms(rerun: Rerun, sites: list[int]) -> list[Room]:
    """The observed weights of the readout's rows, from a run in which nothing is changed."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def look(weights: Tensor, place: Place) -> Tensor:
        seen[place.site] = weights.detach(), place.allowed & ~place.special & place.real[:, None, None]
        return weights

    looking = edits.custom(look, sites=sites, rows="readout", allow_unnormalised=True)
    steps = rerun.resolve(looking)
    rerun(looking)
    rooms = []
    for site in sites:
        (step,), (weights, moves), spot = steps[site], seen[site], rerun.spots[site]
        read = step.valid.to(weights)  # where the readout is not among the queries, all rows count alike
        if spot.rows is None and tuple(rerun.readout.shape) == (spot.shape[0], spot.shape[2]):
            read = read * rerun.readout.to(weights).gather(1, step.rows)
        rooms.append(Room(site, weights, moves, read / read.sum(-1, keepdim=True)))
    return rooms


def _moved(part: Part, rerun: Rerun, rooms: Sequence[Room], weights: Sequence[Tensor]) -> Tensor:
    """``(adversary, example)``: the total variation of the output, differentiable."""
    replaced = [edits.replace(one, sites=room.site) for room, one in zip(rooms, weights, strict=True)]
    outputs = rerun(replaced, variants=len(weights[0]))
    flat = part.values.moved(outputs.flatten(0, 1), [*range(len(part.places))] * len(outputs))
    return flat.view(outputs.shape[:2]) / part.case.scale


@torch.enable_grad()
def _must_depend(part: Part, rerun: Rerun, rooms: Sequence[Room], logits: Sequence[Tensor]) -> None:
    """Refuse models that cut the graph: a search that is not punished finds nothing, which would look exclusive."""
    moved = _moved(part, rerun, rooms, [room.put(one) for room, one in zip(rooms, logits, strict=True)]).sum()
    found = torch.autograd.grad(moved, logits, allow_unused=True) if moved.requires_grad else [None]
    if all(one is None for one in found):
        raise NoGradient(
            "adversarial: the output does not depend on attention differentiably. Take out what cuts the graph behind "
            "the edited sites (detach, no_grad, rounding), or choose other sites."
        )


def _farthest(
    part: Part, rooms: Sequence[Room], weights: Sequence[Tensor], moved: Array, epsilon: float
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Of each example the farthest adversary that keeps the output: its numbers, and its map beside the observed."""
    divergences = np.mean([room.divergence(one) for room, one in zip(rooms, weights, strict=True)], 0)
    keeps = moved <= epsilon  # adversary example
    best, each, found = np.where(keeps, divergences, -1.0).argmax(0), np.arange(len(part.places)), keeps.sum(0)
    taken = [
        torch.where(torch.from_numpy(found > 0).to(one.device)[:, None, None, None], one[best, each], room.weights)
        for room, one in zip(rooms, weights, strict=True)
    ]
    per_head = [room.divergence(one, per_head=True) for room, one in zip(rooms, taken, strict=True)]
    numbers = {"epsilon_max_jsd": divergences[best, each] * (found > 0), "per_head_jsd": np.mean(per_head, 0),
               "moved": moved[best, each] * (found > 0)}  # fmt: skip
    defined = np.any([room.free for room in rooms], 0)
    columns = {name: np.where(defined, column, np.nan) for name, column in numbers.items()}
    share = np.mean([_numbers((room.mass[..., 0].mean(1) * room.read).sum(-1)) for room in rooms], 0)
    return columns | {"found": found, "share": share}, _maps(
        part, rooms, taken, columns["epsilon_max_jsd"], columns["moved"]
    )


def _maps(
    part: Part, rooms: Sequence[Room], taken: Sequence[Tensor], jsds: Array, moved: Array
) -> list[dict[str, Any]]:
    """Of each example its words with the observed and the adversarial map, and how far apart they are."""
    length = (part.batch.source or part.batch).real.shape[1]
    some = [(room, one) for room, one in zip(rooms, taken, strict=True) if one.shape[-1] == length]
    pairs = [
        _numbers((room.map(torch.stack([room.weights, one])) * room.read[..., None]).sum(-2)) for room, one in some
    ]
    both = np.mean(pairs, 0) if pairs else np.zeros((0, len(part.places), length))  # else other sites look elsewhere
    return [
        {
            "words": [*one.words],
            "maps": {
                name: [float(numbers[place, [*rows]].sum()) for rows in one.rows_of_words]
                for name, numbers in zip(("observed", "adversarial"), both, strict=False)
            },
            "caption": f"JSD {jsds[place]:.3f}; the output moves by {moved[place]:.3f} ({part.case.unit}).",
        }
        for place, one in enumerate(part.features)
    ]
