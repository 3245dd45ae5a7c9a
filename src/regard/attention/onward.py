"""What becomes of a site's result: the output projection, the residual it is added to, the norm of the sum.

    out → [reshapes] → linear (addmm, matmul) → [dropout, + what came after] → + residual → [layer norm]

The projection is the next linear map that consumes the result. It is proved on the sampled rows before it is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.attention.projections import Onward
from regard.attention.recognise import CARRY_WEIGHTS, CONTRACT, MULTIPLY
from regard.attention.sites import TOLERANCE
from regard.attention.sources import at_least_float
from regard.attention.tape import Record, Tape

CARRY = CARRY_WEIGHTS - MULTIPLY - {"masked_fill", "where", "div", "truediv", "itruediv"}
ADD = {"add", "radd", "iadd"}


@dataclass(eq=False)
class _Path:
    """One site's result on its way."""

    number: int
    weight: Tensor | None = None  # (input, output)
    bias: Tensor | None = None
    projected: Tensor | None = None
    residual: Tensor | None = None
    total: Tensor | None = None
    norm: tuple[Tensor, float] | None = None
    parallel: bool = False  # something else that was computed after the site is in the sum, too
    goes_on: bool = False  # the sum itself is added to something later: the block is pre-norm


class OnwardTape(Tape):
    """A tape that also sees what becomes of each site's result."""

    def __init__(self, model: nn.Module, batch: Any, **options: Any) -> None:
        super().__init__(model, batch, **options)
        self.paths: list[_Path] = []
        self.carried = WeakIdKeyDictionary()  # tensor → (path, stage)
        self.born = WeakIdKeyDictionary()  # tensor → how many sites had been seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See one call; follow what it does to the results of sites."""
        before = self.count
        result = super().__torch_function__(func, types, args, kwargs)
        name = str(getattr(func, "__name__", "")).strip("_")
        if name == "multi_head_attention_forward":  # what happened inside was seen inside
            return result
        if self.count > before and isinstance(result, Tensor):
            self.paths.append(_Path(before))
            self.carried[result] = (self.paths[-1], "result")
        elif self.paths and isinstance(result, Tensor):
            self._follow(name, [*args, *(kwargs or {}).values()], result)
        if isinstance(result, Tensor) and result not in self.born:
            self.born[result] = self.count
        return result

    def _follow(self, name: str, given: list[Any], result: Tensor) -> None:
        tensors = [x for x in given if isinstance(x, Tensor)]
        carried = [(place, self.carried[x]) for place, x in enumerate(tensors) if x in self.carried]
        if name in ADD:
            for _, (path, stage) in carried:
                path.goes_on |= stage == "total"
            carried = [(place, known) for place, known in carried if known[1] != "total"]
        if not carried:
            return
        place, known = carried[0]
        path, stage = known
        others = tensors[:place] + tensors[place + 1 :]
        if name in CARRY:
            self.carried[result] = known
        elif stage == "result" and (name == "linear" or name == "addmm" or name in CONTRACT) and path.weight is None:
            if others and name == "linear":
                path.weight, path.bias = others[0].T, others[1] if len(others) > 1 else None
            elif others:
                path.weight, path.bias = others[-1], others[0] if name == "addmm" else None
            path.projected = result
            self.carried[result] = (path, "projected")
        elif stage == "projected" and name in ADD and len(others) == 1:
            old = self.born.get(others[0], 0) <= path.number and not isinstance(others[0], nn.Parameter)
            if old and result is not others[0]:  # written into, it would no longer be what it was
                path.residual, path.total = others[0], result
            path.parallel |= not old and not isinstance(others[0], nn.Parameter)
            self.carried[result] = (path, "total" if old else "projected")
        elif stage == "total" and name == "layer_norm" and path.norm is None:
            weight = next((x for x in others if x.dim() == 1), torch.ones(result.shape[-1], device=result.device))
            epsilon = next((x for x in reversed(given) if isinstance(x, float)), 1e-5)
            path.norm = (weight.detach(), epsilon)


def onward_of(tape: Tape, record: Record, number: int) -> Onward | None:
    """What became of a site's result, if it was followed and can be proved; None otherwise."""
    if not isinstance(tape, OnwardTape) or tape.shards is not None:  # the projection is spread as heads are
        return None
    path = next(path for path in tape.paths if path.number == number)
    heads, channels, sample = record.source.shape[1], record.source.values.shape[-1], record.sample
    if path.weight is None or path.projected is None or path.weight.shape[0] != heads * channels:
        return None
    projection = at_least_float(path.weight.detach()).reshape(heads, channels, -1)
    expected = torch.einsum("ehrc,hco->ero", at_least_float(sample.out), projection)
    if path.bias is not None:
        expected = expected + path.bias.detach()
    shown = tape.real_rows(record, 2)[:, sample.rows]

    def proved(found: Tensor) -> bool:
        gap = (found[:, sample.rows] - expected).abs()[shown].max()
        return bool(gap <= 10 * TOLERANCE.get(record.sample.out.dtype, 1e-4) * expected.abs()[shown].max())

    if not any(proved(projected) for (projected,) in _arranged(record, path.projected)):
        return None
    if path.residual is not None and path.total is not None:
        for residual, total in _arranged(record, path.residual, path.total):
            if path.parallel or proved(total - residual):  # what else was added cannot be told apart from the sum
                norm = None if path.goes_on or path.parallel else path.norm
                return Onward(projection, residual, norm, total)
    return Onward(projection, None, None, None)


def _arranged(record: Record, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """``(example, query, output)``, whichever of the two axes comes first."""
    examples, _, queries, _ = record.source.shape
    if all(x.numel() == examples * queries * x.shape[-1] for x in tensors):
        floats = [at_least_float(x.detach()) for x in tensors]
        yield tuple(x.reshape(examples, queries, -1) for x in floats)
        yield tuple(x.reshape(queries, examples, -1).transpose(0, 1) for x in floats)
