"""Hard Concrete gates on heads (Voita et al. 2019): trained by themselves, or together with a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Rerun
from regard.attention.learning import Watch
from regard.data import Example
from regard.errors import within
from regard.training import PROBED, Aim, Pupil, Step, inputs_of, labelled

TEMPERATURE = 0.33
LOW, HIGH = -0.1, 1.1  # what gates are stretched to before they are clipped
EDGE = 1e-6  # of what is drawn
BEGIN = math.log(HIGH / -LOW)  # log a, from which on a gate is 1 at test time


class HardConcrete(nn.Module):
    """A gate from 0 to 1 for each of some heads, which is 0 or 1 with a probability that can be learned.

    NOTE[DIFF] gates begin open, so that training begins with the model as it is.

    Shape: ``(head,)``.
    """

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.log_a = nn.Parameter(torch.full((heads,), BEGIN))

    def forward(self) -> Tensor:
        """The gates: drawn in train mode, else those of test time."""
        return self.drawn(torch.rand_like(self.log_a)) if self.training else self.settled

    def drawn(self, u: Tensor) -> Tensor:
        """g = clip(s · 1.2 − 0.1, 0, 1), s = σ((log u − log(1 − u) + log a) / T), u uniform from 0 to 1."""
        u = u.clamp(EDGE, 1 - EDGE)
        return _stretched(torch.sigmoid((u.log() - (1 - u).log() + self.log_a) / TEMPERATURE))

    @property
    def settled(self) -> Tensor:
        """At test time: clip(σ(log a) · 1.2 − 0.1, 0, 1)."""
        return _stretched(torch.sigmoid(self.log_a))

    @property
    def open(self) -> Tensor:
        """P(g > 0) = σ(log a − T · log(0.1 / 1.1))."""
        return torch.sigmoid(self.log_a - TEMPERATURE * math.log(-LOW / HIGH))


def _stretched(s: Tensor) -> Tensor:
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class Gated(Aim):
    """The usual loss of a model whose heads are gated, and λ Σ_h P(open): what an open head costs. Made by `gated`.

    Args:
        gates: of the heads of all sites, in order of execution.
        penalty: λ.
        learning_rate: of the gates; the model has its own.
    """

    gates: HardConcrete = None  # type: ignore[assignment]  # what comes before it has defaults
    penalty: float = 0.01
    learning_rate: float = 0.1

    def pupil(self, subject: Any, examples: Sequence[Example]) -> Pupil:
        """The subject, each of its heads multiplied by its gate."""
        return Pupil(subject, Watch(subject, inputs_of(examples[:PROBED]), gates=self.gates))

    def learner(
        self, model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer]
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Model and gates, each at its own pace."""
        optimizer = make(model)
        optimizer.add_param_group(
            {"params": [*self.gates.parameters()], "lr": self.learning_rate, "weight_decay": 0.0}
        )  # fmt: skip
        return nn.ModuleDict({"model": model, "gates": self.gates}), optimizer

    def loss(self, step: Step) -> Tensor:
        """L + λ Σ_h P(open)."""
        return step.usual + self.penalty * self.gates.open.sum().to(step.output.device)

    def quality(self, pupil: Pupil, examples: Sequence[Example]) -> float:
        """Minus the same loss, by the gates of test time: the most accurate epoch would be one with open gates."""
        losses = [(float(self.loss(step)), len(step.examples)) for step in pupil.steps(examples)]
        return -sum(loss * count for loss, count in losses) / len(examples)


def gated(subject: Any, data: Any, *, penalty: float = 0.01, learning_rate: float = 0.1) -> Gated:
    """What `regard.fit` trains a model for together with gates on its heads, as Voita et al. (2019) do.

    Args:
        subject: what will be trained.
        data: examples with labels; the first ones tell which heads there are.
        penalty: λ, in units of the loss: a head stays open if it is worth more.
        learning_rate: of the gates; the model has its own.

    Example::

        subject = recipe.build(train, seed)
        aim = gated(subject, train, penalty=0.01)
        regard.fit(subject, train, aim=aim, **recipe.fit)
        aim.gates.settled                           # (head,): those at 0 are gone
        aim.pupil(subject, test).fits(test)         # how right the model is with its gates
    """
    within("penalty", penalty, 0, math.inf, ends="[)")
    within("learning_rate", learning_rate, 0, math.inf)
    few = labelled(data)[:PROBED]
    heads = sum(spot.shape[1] for spot in Rerun(subject, inputs_of(few)).spots)
    return Gated(gates=HardConcrete(heads), penalty=penalty, learning_rate=learning_rate)
