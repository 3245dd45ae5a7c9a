"""Where a site's queries, keys and values come from: the linear maps that made them of the rows' states.

    state → [norm] → linear (addmm, matmul) → [reshapes, splits, heads that share] → query, key or value

A twin goes along with the result of each linear map: a tensor of the same shape that holds the place of each number in
that result. What is done to the shape of one is done to the other, so at the site the twin says which output unit each
channel of each head is, and which row it was made of. The map is proved on the sampled rows before it is used.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.attention.onward import CARRY, OnwardTape
from regard.attention.projections import Inward, Norm, Projection
from regard.attention.recognise import CARRY_SCORES, CONTRACT, MULTIPLY, einsum_labels, matmul_labels, tensors_in
from regard.attention.sites import TOLERANCE
from regard.attention.sources import Fused, at_least_float
from regard.attention.tape import Record, Tape, relevant_name

CAST = {"to", "type", "type_as", "float", "double", "half", "bfloat16", "dropout", "nan_to_num"}  # no axis moves
DIVIDE = {"div", "truediv", "itruediv"}
PARTS = {"query": 2, "key": 3, "value": 3}  # and the axis of the site's shape that their rows are
JOIN = {"cat", "concat", "stack", "view_as_complex"}


@dataclass(frozen=True, eq=False)
class _Made:
    """What a linear map made of a state, or a part of it.

    Args:
        state: ``(…, input)``, what the map was given.
        map: ``(output, input)``.
        twin: of each number its place in the map's result; None: it is the whole result.
        factor: a number that it was multiplied by since.
    """

    state: Tensor
    map: Projection
    twin: Tensor | None = None
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class _Taken:
    """What a site takes, leading axes as the model has them, on a few rows."""

    map: Projection
    units: Tensor  # (*lead, channel): which output of the map each channel is
    states: Tensor  # (*lead, row, input)
    found: Tensor  # (*lead, row, channel): what the model itself computed
    rows: Tensor
    factor: float


class InwardTape(OnwardTape):
    """A tape that also sees where each site's queries, keys and values come from, and the ends of the stream."""

    def __init__(self, model: nn.Module, batch: Any, **options: Any) -> None:
        super().__init__(model, batch, **options)
        self.made = WeakIdKeyDictionary()  # tensor → _Made
        self.lost = WeakIdKeyDictionary()  # tensor → what was done to what a linear map had made
        self.normed = WeakIdKeyDictionary()  # tensor → Norm
        self.scored = WeakIdKeyDictionary()  # hand-written scores and weights → their query and key
        self.taken: list[dict[str, _Taken | str]] = []  # for each site
        self.last: Projection | None = None  # the last linear map of the pass
        self.tables: list[Tensor] = []  # (number, state): what was looked up by number, as the embedding of tokens

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See one call; follow the results of linear maps."""
        kwargs, before = kwargs or {}, self.count
        result = super().__torch_function__(func, types, args, kwargs)
        name = relevant_name(func) or str(getattr(func, "__name__", "")).strip("_")
        given = list(tensors_in(args, kwargs))
        if name == "multi_head_attention_forward" or not given:  # what happened inside was seen inside
            return result
        if name in JOIN and sum(x.numel() > 0 for x in given) == 1:  # a cache that is still empty
            given, name = [x for x in given if x.numel()], "clone"
            func, args, kwargs = torch.clone, given, {}
        if self.count > before:
            self.taken.append(self._take(func, name, args, kwargs, given, result))
        elif isinstance(result, Tensor) and (made := self._linear(name, given, kwargs)):
            self.made[result], self.last = made, made.map
        else:
            self._carry(func, name, args, kwargs, given, result)
            self._score(name, args, given, result)
            self._table(name, args, given)
        return result

    def _linear(self, name: str, given: list[Tensor], kwargs: Any) -> _Made | None:
        """The linear map that a call is, if it is one."""
        bias = None
        if name == "linear" and len(given) > 1:
            state, weight, *rest = given
            bias = rest[0] if rest else None
        elif name == "addmm" and len(given) == 3 and not {"alpha", "beta"} & set(kwargs):
            bias, state, weight = given[0], given[1], given[2].T
        elif name in CONTRACT - {"einsum", "baddbmm"} and len(given) == 2:
            state, weight = given if name != "rmatmul" else given[::-1]
            if weight.dim() != 2 or state.dim() < 2 or not self.follower.is_fixed(weight):
                return None
            weight = weight.T
        else:
            return None
        if weight.dim() != 2 or self.follower.is_fixed(state):
            return None
        return _Made(state, Projection(weight, bias, self.normed.get(state)))

    def _carry(self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], result: Any) -> None:
        """What a call makes of the results of linear maps, and of norms."""
        results = list(tensors_in((result,), {}))
        norm = self._norm(name, given, result)
        made = [self.made[x] for x in given if x in self.made]
        lost = {one for x in given for one in self.lost.get(x, ())}
        for x in results:
            if norm is not None and x.shape[-1:] == norm.weight.shape:
                self.normed[x] = norm
        others = [x for x in (*args, *kwargs.values()) if x is not given[0]]
        if len(made) == 1 and not lost and given[0] in self.made:
            if name in CAST:
                self.made[results[0]] = made[0]
                return
            if name in CARRY:
                twin = _twin(made[0], given[0])
                named = {option: twin if x is given[0] else x for option, x in kwargs.items()}
                moved = func(*[twin if x is given[0] else x for x in args], **named)
                for x, part in zip(results, tensors_in((moved,), {}), strict=True):
                    self.made[x] = replace(made[0], twin=part)
                return
            if name in MULTIPLY | DIVIDE and len(others) == 1 and (number := _number(others[0])):
                factor = number if name in MULTIPLY else 1 / number
                self.made[results[0]] = replace(made[0], factor=made[0].factor * factor)
                return
        if made or lost:
            for x in results:
                self.made.pop(x, None)  # it may have been written into
                self.lost[x] = lost if name in CARRY else lost | {name}

    def _norm(self, name: str, given: list[Tensor], result: Any) -> Norm | None:
        """What a state was multiplied by last, feature by feature: the weight of a norm."""
        if name in CARRY | CAST:
            known: Norm | None = self.normed.get(given[0])
            return known
        if name in {"layer_norm", "rms_norm"}:
            weight = next((x for x in given[1:] if x.dim() == 1), given[0].new_ones(result.shape[-1]))
            return Norm(weight.detach(), name == "layer_norm")
        if name in MULTIPLY and len(given) == 2:  # the last step of an RMS norm that is written out
            state, weight = sorted(given, key=Tensor.dim, reverse=True)
            if weight.dim() == 1 < state.dim() and weight.shape == state.shape[-1:]:
                return Norm(weight.detach(), centred=False)
        return None

    def _score(self, name: str, args: Any, given: list[Tensor], result: Any) -> None:
        """The query and key of scores that the model writes out itself, and what becomes of these."""
        if name in CARRY_SCORES | {"softmax"}:
            known = next((self.scored[x] for x in given if x in self.scored), None)
            for x in tensors_in((result,), {}) if known else ():
                self.scored[x] = known
        elif name in CONTRACT:
            pair = given[name == "baddbmm" :]
            if name == "rmatmul":
                pair = pair[::-1]
            if len(pair) != 2:
                return
            labels = einsum_labels(args[0], *pair) if name == "einsum" else matmul_labels(pair[0], pair[1], result)
            if labels is None or result.dim() < 2:
                return
            *lead, query, key = list(labels[2])
            summed = [label for label in labels[0] if label in labels[1] and label not in labels[2]]
            sides = [(x, side, [*lead, row, *summed]) for x, side, row in zip(pair, labels, (query, key), strict=False)]
            if len(summed) == 1 and all(set(wanted) == set(side) for _, side, wanted in sides):
                orders = [[side.index(label) for label in wanted] for _, side, wanted in sides]
                self.scored[result] = [self._part(x, x, order) for (x, _, _), order in zip(sides, orders, strict=True)]

    def _table(self, name: str, args: Any, given: list[Tensor]) -> None:
        """What numbers look up: a table of states, one for each token or position."""
        looked_up = given[1] if name == "embedding" else given[0] if name == "getitem" else None
        if looked_up is None or looked_up.dim() != 2 or not self.follower.is_fixed(looked_up):
            return
        if name == "embedding" or (isinstance(args[1], Tensor) and args[1].dtype == torch.long):
            self.tables.append(looked_up.detach())

    def _take(
        self, func: Any, name: str, args: Any, kwargs: Any, given: list[Tensor], result: Tensor
    ) -> dict[str, _Taken | str]:
        """What a site takes: query, key and value."""
        source = self.records[-1].unread
        if isinstance(source, Fused):
            actual = (source.q, source.k, source.values)
            return {part: self._part(x, y) for part, x, y in zip(PARTS, given, actual, strict=False)}
        query, key = next((self.scored[x] for x in given if x in self.scored), ("no product of two maps was seen",) * 2)
        if name == "sum":
            return {"query": query, "key": key, "value": "weights and values are multiplied and then summed"}
        values = next(x for x in given[name == "baddbmm" :] if x not in self.follower.flows)
        if values not in self.made:
            return {"query": query, "key": key, "value": self._part(values, source.values)}
        twin = _twin(self.made[values], values)
        again = [twin if x is values else x for x in args]
        mix = self.follower.follow(func, name, again, kwargs, result, self._module_name)
        assert mix is not None  # as it was for the values themselves
        return {"query": query, "key": key, "value": self._part(values, source.values, twin=mix.values)}

    def _part(
        self, x: Tensor, found: Tensor, order: list[int] | None = None, *, twin: Tensor | None = None
    ) -> _Taken | str:
        """What is known of a tensor that a site takes, ``(*lead, row, channel)`` in this order of its axes."""
        made: _Made | None = self.made.get(x)
        if made is None:
            steps = self.lost.get(x, set())
            if MULTIPLY & steps and JOIN & steps:  # its channels were multiplied, and put together anew
                return "it was rotated by its position (rotary positions): no one linear map makes it at all rows"
            return f"after its linear map came {', '.join(sorted(steps))}" if steps else "no linear map was seen"
        twin = _twin(made, x) if twin is None else twin
        if order is not None:
            twin, found = twin.permute(order), found.permute(order)
        places, outputs = twin, len(made.map.weight)
        units = places % outputs
        if not bool((units == units[..., :1, :]).all()):
            return "which output of the linear map a channel is depends on the row"
        rows = self._sampled_rows(places.shape[-2], places.device)
        states = made.state.detach().reshape(-1, made.state.shape[-1])
        taken = states[places[..., rows, 0].div(outputs, rounding_mode="floor")]
        return _Taken(made.map, units[..., 0, :], taken, found.detach()[..., rows, :], rows, made.factor)


def inward_of(tape: Tape, record: Record, number: int) -> Inward | None:
    """Where a site's queries, keys and values come from, as far as it was followed and can be proved."""
    if not isinstance(tape, InwardTape) or tape.shards is not None:
        return None
    parts = {part: _proved(tape, record, tape.taken[number][part], axis) for part, axis in PARTS.items()}
    maps = {part: one for part, one in parts.items() if isinstance(one, Projection)}
    return Inward(**maps, why={part: one for part, one in parts.items() if isinstance(one, str)})


def _proved(tape: Tape, record: Record, taken: _Taken | str, axis: int) -> Projection | str:
    """``(head, channel, input)``: the part of a linear map that each head has, or why it is not known."""
    if isinstance(taken, str):
        return taken
    units, states, found = (record.read(x) for x in (taken.units, taken.states, taken.found))
    if not bool((units == units[:1]).all()):
        return "which output of the linear map a channel is depends on the example"
    weight = at_least_float(taken.map.weight.detach())[units[0]] * taken.factor
    bias = taken.map.bias
    bias = None if bias is None else at_least_float(bias.detach())[units[0]] * taken.factor
    again = torch.einsum("ehri,hci->ehrc", at_least_float(states), weight)
    again = again if bias is None else again + bias[:, None]
    shown = tape.real_rows(record, axis)[:, None, taken.rows, None]
    gap, size = ((x.abs().where(shown, 0.0)).max() for x in (again - found, again))
    if not bool(gap <= 10 * TOLERANCE.get(found.dtype, 1e-4) * size):
        return "the linear map that was seen does not reproduce it"
    share = record.source.shape[1] // len(weight)
    every = [None if x is None else x.repeat_interleave(share, 0) for x in (weight, bias)]
    assert every[0] is not None
    return Projection(every[0], every[1], taken.map.norm)


def _twin(made: _Made, x: Tensor) -> Tensor:
    """Of each number its place in the result of the linear map."""
    return torch.arange(x.numel(), device=x.device).view(x.shape) if made.twin is None else made.twin


def _number(x: Any) -> float | None:
    """A factor other than 0, if it is one number."""
    if isinstance(x, Tensor) and x.dim() == 0:
        x = float(x)
    return float(x) if isinstance(x, (int, float)) and x else None
