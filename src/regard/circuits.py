"""For probes of circuits: random text and what heads do on it; what heads read from the stream of states, and its ends.

A head reads the stream through W_Q, W_K and W_V, and writes into it through W_O. A norm before a map is folded into it:
its weight, and for a layer norm the mean that it takes away. What it divides by is another number at each row; nothing
here depends on it. In a post-norm block the rows themselves are what is read and added to, so nothing is folded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention import Site, Trace, trace
from regard.attention.inward import InwardTape
from regard.attention.running import batch_of, run, undisturbed
from regard.attention.sources import at_least_float
from regard.errors import NotServed, OptionError, at_least_one
from regard.glimpses import Glimpse, Survey, row_means
from regard.probed import Array, Probed, tabled
from regard.training import inputs_of

EDGE, LARGE = 0.04, 1000  # the share of a vocabulary that is left out at both ends, if it has so many tokens
Look = Callable[[Glimpse, Tensor], Tensor]


def random_text(subject: Any, *, tokens: int, repeats: int, sequences: int, seed: int) -> Tensor:
    """``(sequence, row)``: so many different random tokens, over and over, after the token that texts begin with.

    Special tokens are left out, and of a large vocabulary the most and least common: the first and last 4 % of its
    numbers. How common a token is, a tokenizer does not say; byte-pair merges are numbered as they were learned.
    """
    ids, begin = subject.vocabulary
    for name, count in {"tokens": tokens, "repeats": repeats, "sequences": sequences}.items():
        at_least_one(name, count)
    edge = int(len(ids) * EDGE) if len(ids) >= LARGE else 0
    drawn_from = ids[edge : len(ids) - edge]
    if tokens > len(drawn_from):
        raise OptionError(f"tokens={tokens}: there are {len(drawn_from)} different ones to draw from. Ask for fewer.")
    lots = torch.Generator().manual_seed(seed)
    some = [drawn_from[torch.randperm(len(drawn_from), generator=lots)[:tokens]] for _ in range(sequences)]
    text = torch.stack(some).repeat(1, repeats)
    return text if begin is None else torch.cat([torch.full_like(text[:, :1], begin), text], 1)


def on_text(survey: Survey, ids: Tensor, look: Look, *, onward: bool = False) -> Array:
    """``(sequence, head)``: means over rows of what ``look(glimpse, ids)`` sees, ``(example, head, row)``."""
    found = []
    for some in ids.split(survey.batch_size):
        seen = trace(survey.subject, survey.subject.of_ids(some), onward=onward)
        asked: dict[str, Any] = {"": (lambda glimpse, some=some: look(glimpse, some.to(glimpse.weights.device)), 1)}
        found.append(torch.cat([row_means(seen, site, asked)[""][:, 0] for site in seen.sites], -1))
    return torch.cat(found).numpy()


def summed_up(survey: Survey, values: Array, role: str = "", least: float = np.inf) -> Probed:
    """What was seen on each text, ``(sequence, head)``, as a number for each head; a role for those with enough."""
    drawn = survey.drawn(values)
    best = np.nan_to_num(-drawn[0], nan=np.inf).argsort(kind="stable")[:5]
    places = survey.index[["layer", "head"]].to_numpy()
    listed = ", ".join(f"{places[at][0]}.{places[at][1]} ({drawn[0, at]:.2f})" for at in best)
    labels = [role if value >= least else "" for value in drawn[0]] if role else None
    count = f"{sum(map(bool, labels))} of {len(labels)} heads have {least:g} or more. " if labels else ""
    return Probed("", "", tabled(survey.index, drawn, labels), f"{count}Most have, by layer.head, {listed}.")


def wired(survey: Survey) -> Trace:
    """The trace of two examples, which knows how each site reads and writes."""
    return trace(survey.subject, inputs_of(survey.examples[:2]), inward=True)


def reads(site: Site, part: str) -> Tensor | None:
    """``(head, channel, state)``: the map from the stream to the queries, keys or values of a site; None: not known."""
    projection = getattr(site.inward, part, None)
    if projection is None:
        return None
    post_norm = site.onward is not None and site.onward.norm is not None
    return projection.weight if post_norm else projection.folded  # type: ignore[no-any-return]


def unknown(subject: Any, seen: Trace) -> str | None:
    """Why nothing can be said of what heads read and write: for ``cannot`` of probes that are about it."""
    if any(site.onward is not None and reads(site, "value") is not None for site in seen.sites):
        return None
    why = {site.inward.why.get("value", "no output projection was seen") for site in seen.sites if site.inward}
    return f"how its heads read and write is not known: {'; '.join(sorted(why))}."


def ends(survey: Survey) -> tuple[Tensor, Tensor] | None:
    """W_E and W_U, both ``(token, state)``, the last norm folded into W_U; None: the model has no such ends.

    The unembedding is the last linear map of a run, the embedding the table of as many states that was looked up in.
    """
    subject = survey.subject
    if getattr(subject, "vocabulary", None) is None:
        return None
    batch = batch_of(subject, inputs_of(survey.examples[:2]))
    tape = InwardTape(subject.model, batch)
    with undisturbed(subject.model):
        run(subject, batch, tape, gradients=False)
    last = tape.last
    tables = [table for table in tape.tables if last is not None and table.shape == last.weight.shape]
    if last is None or not tables:
        return None
    return at_least_float(tables[0]), at_least_float(last.folded.detach())


def must_end(survey: Survey) -> tuple[Tensor, Tensor]:
    """W_E and W_U; refuses models without."""
    found = ends(survey)
    if found is None:
        raise NotServed("it is about logits, and no unembedding of as many tokens as are embedded was seen.")
    return found
