"""Which of all attention patterns matter? A large model has thousands for one prompt; a person looks at ten."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from regard import draw
from regard.attention import Site, Trace, trace
from regard.errors import InputError, NoSuchPart, OptionError
from regard.types import Of, Subject, Target


@dataclass(frozen=True, eq=False)
class Patterns:
    """Layer × head patterns of one input, by their effect on the output. Made by `regard.patterns`.

    Args:
        trace: of the input, with gradients.
    """

    trace: Trace

    def __repr__(self) -> str:
        return f"Patterns({sum(site.heads for site in self.trace.sites)} of {self._target!r})"

    def frame(self, top: int | None = 10) -> pd.DataFrame:
        """The patterns with the largest effects: layer, name of the site, head, effect, and what the readout looks at.

        ``effect`` is the gradient of the target by a factor on all that the head hands on: to first order, what the
        target would lose without it. ``share`` is its part of all effects, by size. ``entropy`` and ``looks_at`` (the
        key that gets most, and its ``position``) are those of the readout's rows.
        """
        if top is not None and top < 1:
            raise OptionError(f"top={top!r} must be 1 or more, or None for all.")
        rows = [
            {"layer": site.index, "site": site.name, "head": head, "effect": effect}
            for site in self.trace.sites
            for head, effect in enumerate(self._effects(site))
        ]
        table = pd.DataFrame(rows)
        sizes = table["effect"].abs()
        table["share"] = sizes / max(float(sizes.sum()), 1e-30)
        table = table.loc[sizes.sort_values(ascending=False, kind="stable").index].head(top or len(table))
        looked = {layer: self._looks(self.trace.sites[layer]) for layer in table["layer"].unique()}
        chosen = list(zip(table["layer"], table["head"], strict=True))
        for column in ("entropy", "looks_at", "position"):
            table[column] = [looked[layer][column][head] for layer, head in chosen]
        return table.reset_index(drop=True)

    def plot(self) -> draw.Picture:
        """All effects, as a grid of layers × heads."""
        if len({site.heads for site in self.trace.sites}) > 1:
            raise OptionError("the sites differ in their number of heads, so there is no grid. Use .frame().")
        values = [self._effects(site) for site in self.trace.sites]
        return draw.heads_grid(
            values, title=f"Which heads move {self._target}?", legend="effect", caption=self._caption
        )

    def map(self, layer: int, head: int) -> draw.Picture:
        """One pattern: token × token attention."""
        site: Site = self.trace.sites[layer]
        weights = site.weights(heads=head)[0, 0].numpy(force=True)
        rows, keys = (self.trace.batch.sequence_of(size) for size in weights.shape)
        if rows is None or keys is None:
            raise NoSuchPart(f"layer={layer}: the rows of {site.name} are not tokens, so they have no names.")
        seen = weights[list(rows.features[0].rows)][:, list(keys.features[0].rows)]
        return draw.token_map(
            seen, list(rows.features[0].tokens), list(keys.features[0].tokens), legend="attention",
            title=f"Layer {site.index}, head {head}", caption=f"{site.name}; {self._caption}",
        )  # fmt: skip

    def _repr_html_(self) -> str:
        return self.plot()._repr_html_()

    @property
    def _target(self) -> str:
        assert self.trace.score is not None
        return self.trace.score.names[0]

    @property
    def _caption(self) -> str:
        return f"Effect: ∂({self.trace.of} of {self._target}) / ∂(a factor on the head)."

    @staticmethod
    def _effects(site: Site) -> list[float]:
        assert site.gate_gradient is not None
        return [float(effect) for effect in site.gate_gradient[0]]

    def _looks(self, site: Site) -> dict[str, list[Any]]:
        """For each head of a site the entropy of the readout's row, and the token that it gives most to."""
        if not self.trace.reads(site):
            return {
                "entropy": [float("nan")] * site.heads,
                "looks_at": [""] * site.heads,
                "position": [-1] * site.heads,
            }
        sequence = self.trace.batch.sequence_of(site.shape[3])
        named = () if sequence is None else zip(sequence.features[0].rows, sequence.features[0].tokens, strict=True)
        names = dict(named)
        places: list[int] = site.pull(self.trace.readout, per_head=True)[0].argmax(-1).tolist()
        entropy: list[float] = site.entropy(self.trace.readout)[0].tolist()
        return {"entropy": entropy, "looks_at": [names.get(place, "") for place in places], "position": places}


def patterns(subject: Subject, inputs: Any, *, target: Target = None, of: Of = "logit") -> Patterns:
    """Rank all layer × head attention patterns of one input by their effect on the output, in one backward pass.

    Args:
        subject: made by `regard.text`, `regard.causal` and the like.
        inputs: one input.
        target: the class, label, token, pair or function of the output; None: what is predicted.
        of: "logit", "probability" or "logprob" of the target.

    Example::

        found = regard.patterns(regard.causal("SmolLM2.gguf"), "The capital of France is")
        found.frame(top=10)
        found.map(layer=24, head=3).save("pattern.html")
    """
    found = trace(subject, inputs, gradients=True, target=target, of=of)
    if len(found.batch) != 1:
        raise InputError(f"inputs holds {len(found.batch)} examples: patterns are those of one. Pass it alone.")
    return Patterns(found)
