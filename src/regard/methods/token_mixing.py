"""How much of each input token is left in a state, and can the token still be told from it?"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from regard.attention import Trace, trace
from regard.attention.blocks import Block, block_of, find_blocks
from regard.attention.paths import no_path
from regard.errors import InputError, NotServed, OptionError, choose, whole_numbers
from regard.memory import must_fit
from regard.progress import Counter
from regard.types import Scores, Subject

FAMILY = "attention"
NEEDS = ("gradients", "reruns")
CITE = "brunner2020identifiability"
FORMULA = "‖∂e_q/∂x_i‖ / Σ_j ‖∂e_q/∂x_j‖"
PASSES = "2 forward; a readout row: one backward a channel, or `probes`"
OF = "logit"
ROWS_AT_ONCE = 4096
Recover = Literal["nearest", "linear", "mlp"]


def cannot(trace: Trace) -> str | None:
    """States are those of one sequence of rows."""
    if trace.batch.source is not None or any(site.kind != "self" for site in trace.sites):
        return "hidden token attribution follows one sequence through self-attention."
    return no_path(trace)


def token_mixing(
    trace: Trace, *, probes: int | None = None, seed: int = 0, per_layer: bool = False, matrix: bool = False
) -> Scores:
    """Hidden token attribution (Brunner et al. 2020): the share of each input in the readout: ``(example, row)``.

    e_q is the state of row q after a layer, x_i what goes into the first layer; the share is the Frobenius norm of the
    Jacobian, rows divided by their sums. The sites' blocks tell the states, see `regard.attention.blocks`. Differs from
    the paper nowhere. Its other half, whether a token can be recovered from a state, is `regard.identifiability`.

    Args:
        trace: what was traced.
        probes: estimate the norms from so many random directions instead of all channels; the squares are unbiased.
        seed: of the probes.
        per_layer: after each layer: ``(layer, row)``; otherwise after the last.
        matrix: for all rows, not only the readout: ``(query, row)``.
    """
    if probes is not None and (whole_numbers("probes", probes)[0] < 1):
        raise OptionError(f"probes={probes!r} must be 1 or more, or None for all channels.")
    blocks, _ = find_blocks(trace)
    start = _first(blocks)
    layers = sorted(blocks) if per_layer else sorted(blocks)[-1:]
    for layer in {min(blocks), *layers}:
        block_of(trace, blocks, trace.sites[layer])  # raises if it is not a whole layer
    channels = blocks[layers[-1]].after.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    directions = torch.eye(channels)
    if probes is not None:
        directions = torch.randn(probes, channels, generator=generator)
    examples, rows = trace.real.shape
    must_fit("the attributions", (examples, len(layers), rows, rows))
    squares = torch.zeros(examples, len(layers), rows, rows, dtype=trace.sites[0].dtype)  # example layer query input
    wanted = [one.nonzero().squeeze(-1).tolist() for one in (trace.real if matrix else trace.readout > 0)]
    with Counter("token mixing", len(directions) * sum(map(len, wanted))) as counter:
        for example, queries in enumerate(wanted):
            todo = [(query, one) for query in queries for one in range(len(directions))]
            size = min(len(todo), max(1, ROWS_AT_ONCE // rows))
            # copies of the example run together; each backward pass asks every copy for another row and direction
            found, leaf = find_blocks(trace, trace.batch.pick([example] * size), leaf=start.call)
            assert leaf is not None
            for place in range(0, len(todo), size):
                query, one = torch.tensor(todo[place : place + size]).T
                copy = torch.arange(len(query))
                for number, layer in enumerate(layers):
                    states = found[layer].after[copy, query]
                    if not states.requires_grad:
                        raise NotServed("the states cannot be differentiated by what goes into the first layer.")
                    scalar = (states * directions[one].to(states)).sum()
                    (gradient,) = torch.autograd.grad(scalar, [leaf], retain_graph=True)
                    gradient = gradient.transpose(0, 1) if start.rows_first else gradient
                    sizes = gradient[: len(query)].to(squares.dtype).square().sum(-1).cpu()  # copy input
                    squares[example, number].index_add_(0, query, sizes)
                counter.advance(len(query))
    norms = squares.sqrt() * trace.real.cpu()[:, None, None]
    shares = (norms / norms.sum(-1, keepdim=True).clamp_min(torch.finfo(norms.dtype).tiny)).to(trace.readout.device)
    if not matrix:
        shares = torch.einsum("eq,elqi->eli", trace.readout.to(shares), shares)
    return Scores(shares if per_layer else shares[:, 0], None, ("layer",) * per_layer + ("query",) * matrix)


def identifiability(
    subject: Subject,
    inputs: Sequence[Any],
    *,
    recover: Recover | Sequence[Recover] = ("nearest", "linear"),
    held_out: float = 0.3,
    seed: int = 0,
) -> pd.DataFrame:
    """Token identifiability (Brunner et al. 2020): from how many states can their own input token be told?

    A token is identified if the map of its state is nearer, by cosine, to what went into the first layer at its row
    than at any other row of the same example. The maps: "nearest": none; "linear": ridge regression; "mlp": a
    perceptron with one hidden layer. All are measured on examples that the trained ones have not seen.

    Args:
        subject: made by `regard.text`, `regard.causal` and the like.
        inputs: at least two examples; some hundred for the trained maps to mean much.
        recover: one or several of the maps.
        held_out: the share of the examples that the rates are measured on.
        seed: of the split and of training.

    Returns:
        A row for each layer and map: ``layer, recover, rate, chance, tokens``.
    """
    listed = [recover] if isinstance(recover, str) else list(recover)
    for one in listed:
        choose("recover", one, ("nearest", "linear", "mlp"))
    examples = list(inputs)
    if len(examples) < 2 or not 0 < held_out < 1:
        raise InputError(
            f"inputs has {len(examples)} examples and held_out={held_out}: it takes two or more, and a share in (0, 1)."
        )
    order = np.random.default_rng(seed).permutation(len(examples))
    count = min(max(1, round(held_out * len(examples))), len(examples) - 1)
    states: list[list[NDArray[np.float32]]] = []  # example; the input, then each layer: (token, channel)
    with Counter("reading states", len(examples)) as counter:
        for example in examples:
            read_from = trace(subject, [example])
            if reason := cannot(read_from):
                raise NotServed(f"inputs[{counter.done}]: {reason}")
            found, _ = find_blocks(read_from)
            first = _first(found)
            rows = torch.tensor(read_from.features[0].rows)
            read = [first.before, *(found[layer].after for layer in sorted(found))]
            states.append([state[0, rows.to(state.device)].float().numpy(force=True) for state in read])
            counter.advance()
    held = [states[place] for place in order[:count]]
    seen = [states[place] for place in order[count:]]
    rows_of = []
    for layer in range(1, len(states[0])):
        for one in listed:
            g = _fitted(one, seen, layer, seed)
            hits = np.concatenate([_identified(g(example[layer]), example[0]) for example in held])
            chance = np.concatenate([np.full(len(example[0]), 1 / len(example[0])) for example in held])
            rows_of.append(
                {"layer": layer - 1, "recover": one, "rate": hits.mean(), "chance": chance.mean(), "tokens": len(hits)}
            )
    return pd.DataFrame(rows_of)


def _first(blocks: dict[int, Block]) -> Block:
    if not blocks:
        raise NotServed("no submodule holds an attention site together with its residual connection.")
    return blocks[min(blocks)]


def _fitted(recover: Recover, seen: list[list[NDArray[np.float32]]], layer: int, seed: int) -> Any:
    """A map from states to inputs."""
    if recover == "nearest":
        return lambda states: states
    states, inputs = (np.concatenate([example[place] for example in seen]) for place in (layer, 0))
    if recover == "linear":
        from sklearn.linear_model import Ridge

        return Ridge().fit(states, inputs).predict
    from sklearn.neural_network import MLPRegressor

    size = float(states.std()) or 1.0
    fitted = MLPRegressor(
        hidden_layer_sizes=(states.shape[1],), random_state=seed, max_iter=200, early_stopping=len(states) > 100
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that 200 epochs were not enough shows in the rate
        fitted.fit(states / size, inputs)
    return lambda some: fitted.predict(some / size)


def _identified(recovered: NDArray[np.float32], inputs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """For each token, whether its own input is the nearest by cosine."""
    one, two = (x / np.linalg.norm(x, axis=-1, keepdims=True).clip(1e-12) for x in (recovered, inputs))
    hits: NDArray[np.bool_] = (one @ two.T).argmax(-1) == np.arange(len(inputs))
    return hits
