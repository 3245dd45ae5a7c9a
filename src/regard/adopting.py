"""Scores from elsewhere become explanations, and can be judged like the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from regard.attention.entrance import Entrance
from regard.attention.running import batch_of
from regard.attention.tracing import Trace, traced
from regard.catalog import Method
from regard.erasing import Values
from regard.errors import InputError, non_finite
from regard.explaining import Job
from regard.types import Features, Of, Scores, Subject, Targets

FORMULA = "computed elsewhere"


def adopt(
    subject: Subject, inputs: Any, scores: Any, *, name: str, target: Targets = None, of: Of = "logit", **options: Any
) -> Any:
    """Make explanations of scores that were computed elsewhere, or by an algorithm of Captum's.

    Args:
        subject: what is explained.
        inputs: one input or several, as in `regard.explain`.
        scores: for each input (or for the only one) a number for each token, each word, or each row of the encoded
            batch, and for each channel of it (these are summed); what Captum's language-model attributions return; or
            a class of Captum's, such as `captum.attr.GradientShap`, which is then run on the embeddings.
        name: what the method is called.
        target: what is explained; None: what is predicted.
        of: "logit", "probability" or "logprob" of the target.
        options: of the Captum algorithm's ``attribute``.

    Returns:
        An `Explanation` for one input, a list of them for several.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> why = regard.adopt(subject, "so so good so", [0.0, 0.1, 0.9, 0.0], name="lime")
        >>> why.words()["score"].tolist()
        [0.0, 0.1, 0.9, 0.0]
    """
    single = isinstance(inputs, (str, tuple))
    batch = batch_of(subject, inputs)
    trace = traced(subject, batch, gradients=False, onward=False, target=target, of=of)
    if isinstance(scores, type):
        found = _by_captum(trace, scores, options)
    elif options:
        raise InputError(f"{', '.join(options)}: options are for algorithms of Captum's; scores is a {type(scores)}.")
    else:
        listed = [scores] if single else list(scores)
        if len(listed) != len(batch):
            raise InputError(f"scores has {len(listed)} entries for {len(batch)} inputs: pass one for each.")
        found = torch.zeros(batch.real.shape, dtype=torch.float64)
        for example, (given, features) in enumerate(zip(listed, batch.features, strict=True)):
            numbers = _on_tokens(given, features, batch.real.shape[1], f"scores[{example}]")
            found[example, list(features.rows)] = torch.from_numpy(numbers)
    method = Method(name, (), "", lambda trace: Scores(found), "adopted", FORMULA, "", of, lambda trace: None)
    whys = Job(subject, method, {}, of, subject.special, "keep").explained(trace)
    return whys[0] if single else whys


def _on_tokens(given: Any, features: Features, rows: int, what: str) -> NDArray[np.float64]:
    """Scores of tokens; those of a word are shared by its tokens."""
    given = getattr(given, "seq_attr", given)  # of Captum's LLMAttributionResult
    numbers = np.asarray(given.detach().numpy(force=True) if isinstance(given, Tensor) else given, dtype=float)
    numbers = numbers.sum(-1) if numbers.ndim == 2 else numbers
    tokens, words = len(features.tokens), len(features.words)
    if numbers.ndim != 1 or len(numbers) not in (tokens, words, rows):
        raise InputError(
            f"{what} has shape {numbers.shape}; it needs a number for each of {tokens} tokens, {words} words or "
            f"{rows} rows."
        )
    each_once = None not in features.word and len(set(features.word)) == words == tokens  # maybe in another order
    if len(numbers) == words != tokens and features.absent:
        there = np.array([bool(rows) for rows in features.rows_of_words])
        if not np.isnan(numbers[~there]).all():
            raise InputError(f"{what} has numbers for {features.left_out}. Pass NaN in their place.")
        numbers = np.where(there, numbers, 0.0)
    if not np.isfinite(numbers).all():
        raise non_finite(what)
    if len(numbers) == tokens and not each_once:
        return numbers
    if len(numbers) == words:
        sizes = [max(1, len(pieces)) for pieces in features.rows_of_words]
        return np.array([0.0 if word is None else numbers[word] / sizes[word] for word in features.word])
    return numbers[list(features.rows)]


def _by_captum(trace: Trace, algorithm: Any, options: dict[str, Any]) -> Tensor:
    """``(example, row)``: what an algorithm of Captum's gives for the embeddings."""
    values, entrance, size = Values(trace), Entrance(trace.subject, trace.batch), len(trace.batch)
    if trace.batch.source is not None:
        raise InputError("scores: Captum's algorithms are run on inputs that are one sequence.")

    def score(vectors: Tensor) -> Tensor:
        output = entrance.run({"rows": vectors})
        return values.scores(output, [*range(size)] * (len(output) // size))

    with torch.enable_grad():
        found: Tensor = algorithm(score).attribute(entrance.vectors["rows"].clone().requires_grad_(), **options)
    return found.detach().sum(-1) * trace.real
