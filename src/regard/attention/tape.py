"""The door into any PyTorch model: attention as a function call, seen while the model runs as it always does.

A `Tape` is entered for the length of one forward pass. It changes nothing: no hook, no patch, no switch. A
fused kernel keeps running; on the CPU the very kernel that torch would have chosen is called in the way that
also returns its log-sum-exp.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, redispatch_function

from regard.attention.recognise import FOLLOWED, Follower, Ignored, why_not
from regard.attention.sharding import shards_of
from regard.attention.sites import Sample
from regard.attention.sources import Fused, Given
from regard.errors import NoGradient, NotReproduced, non_finite
from regard.memory import give_back
from regard.types import Batch

LONG = 4096  # rows of a batch, from which on what was freed between sites is given back
FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION

# How the leading axes of a site are examples and heads. "plain": examples first; "swap": heads first; "fold": one axis
# holds both, heads run faster; "refold": examples run faster; "single": there is one example. Where shapes do not tell,
# it is settled by looking at one example alone.
Reading = Literal["plain", "swap", "fold", "refold", "single"]


@dataclass(eq=False)
class Record:
    """What the tape keeps of one site."""

    name: str
    unread: Given | Fused  # as the model has it, leading axes not yet told apart
    proof: Sample  # a few rows of what the model itself computed, leading axes as above
    across: bool  # attention across the examples of the batch
    learned: bool  # the scores are not a product of two activations
    examples: int
    readings: tuple[Reading, ...]  # the first is taken
    arrange_out: Callable[[Tensor], Tensor]  # the site's own result to (*lead, query, channel)
    out: Tensor | None = None  # kept for gradients only

    def read(self, x: Tensor) -> Tensor:
        """``(*lead, …)`` to ``(example, head, …)``."""
        return arrange(x, self.unread.values.dim() - 2, self.readings[0], self.examples)

    @cached_property
    def source(self) -> Given | Fused:
        """Where the weights come from, ``(example, head, …)``."""
        return self.unread.map(self.read)

    @cached_property
    def sample(self) -> Sample:
        """A few rows of what the model itself computed, ``(example, head, row, channel)``."""
        return replace(self.proof, out=self.read(self.proof.out))

    def fold(self, result: Tensor) -> Tensor:
        """The site's own result, or its gradient, to ``(example, head, query, channel)``."""
        return self.read(self.arrange_out(result))


class Tape(TorchFunctionMode):
    """Records the sites of one forward pass.

    Args:
        model: the model that will run, for the names of its modules and to know its parameters.
        batch: what it will run on.
        keep_outputs: keep what each site returned, to differentiate by it.
        leaf: number of the site whose output becomes the only leaf of the graph (grad mode is switched on there).
    """

    def __init__(self, model: nn.Module, batch: Batch, *, keep_outputs: bool = False, leaf: int | None = None):
        super().__init__()
        self.names = {id(module): name or type(model).__name__ for name, module in model.named_modules()}
        self.batch = batch
        self.shards = shards_of(model)  # refuses, before anything runs, what cannot be read
        self.keep_outputs = keep_outputs
        self.leaf = leaf
        self.follower = Follower(model)
        self.records: list[Record] = []
        self.count = 0  # sites seen so far
        self.refused: list[Ignored] = []
        self.left_fast_path = False
        self.opaque: set[str] = set()
        self.sampled: dict[int, Tensor] = {}
        self.dropped: dict[int, float] = {}  # by flow: the share of its weights that a site is still to drop

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See one call; run it; return what it returned."""
        kwargs = kwargs or {}
        name = relevant_name(func)
        if name is None:
            return func(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            return self._fused(*args, **kwargs)
        if name == "multi_head_attention_forward":
            self.left_fast_path |= not torch.is_grad_enabled()
            with self:  # its body calls what we are here to see
                return redispatch_function(func, types, args, kwargs)
        result = func(*args, **kwargs)
        if name not in FOLLOWED:
            self.opaque.add(str(func))
            return result
        mix = self.follower.follow(func, name, args, kwargs, result, self._module_name)
        if mix is not None:
            reason = why_not(mix, self.batch, self.follower.is_fixed(mix.values))
            if reason is None:
                source = Given(mix.weights, mix.values, mix.visible)
                recorded = self._record(source, mix.out, result, not mix.flow.product, mix.arrange_out)
                if isinstance(recorded, Record):
                    result = self.edit(recorded, source, result, self.dropped.get(id(mix.flow), 0.0))
                else:
                    reason = recorded
            mix.flow.refused, mix.flow.settled = reason, mix.flow.settled or reason is None
        return self._handed_on(result)

    def edit(self, record: Record, source: Given | Fused, result: Tensor, dropout: float = 0.0) -> Tensor:
        """What the model goes on with instead of a site's own result; here that result.

        ``source`` is the record's, unread and with its graph.
        """
        return result

    def ignored(self) -> tuple[Ignored, ...]:
        """What looked like attention and was not taken for it."""
        return (*self.refused, *self.follower.ignored())

    def _fused(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Run the kernel that torch would run, and keep references to what it was given."""
        out, lse = attend(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        lead = query.shape[:-2]
        mask = attn_mask
        if mask is not None:
            mask = mask[(None,) * (query.dim() - mask.dim())]  # as many axes as q has
            if len(lead) != 2:  # examples and heads are still to be told apart: nothing may be broadcast
                mask = mask.expand(*lead, *mask.shape[-2:])
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        source = Fused(query, key, value, mask, is_causal, scale, lse)
        recorded = self._record(source, out, out, learned=False)
        if isinstance(recorded, Record):
            return self._handed_on(self.edit(recorded, source, out, dropout_p))
        self.refused.append(Ignored(self._module_name(), (*out.shape[:-1], key.shape[-2]), recorded))
        return out

    def _record(
        self, source: Given | Fused, out: Tensor, result: Tensor, learned: bool,
        arrange_out: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> Record | str:  # fmt: skip
        """Keep a site and return it, or the reason why its axes cannot be told.

        ``out`` is ``(*lead, query, channel)``, a view of ``result``, the tensor the model goes on with.
        """
        size, lengths = len(self.batch), self.batch.lengths
        source, out = source.map(Tensor.detach), out.detach()
        query, key = out.shape[-2], source.values.shape[-2]
        lead = tuple(out.shape[:-2])
        # (1, examples, …) is rather a single head, heads first, if so many keys can be rows
        heads_first = lead[1:2] == (size,) and size in lengths
        across = size > 1 and query == key == size and lead[:1] == (1,) and not heads_first
        if key not in lengths and not across:
            listed = " or ".join(map(str, lengths))
            return f"its {key} keys are not rows of the input, which has {listed}"
        examples = 1 if across else size
        possible = readings(lead, examples)
        if possible == ("plain", "swap") and source.values.shape[:-2] != lead:  # heads share values, examples do not
            possible = ("plain",) if source.values.shape[0] == examples else ("swap",)
        if not possible:
            return f"its leading axes {lead} are not {size} examples × heads"
        rows = self._sampled_rows(query, out.device)
        sample = Sample(rows, out.index_select(-2, rows))
        record = Record(self._module_name(), source, sample, across, learned, examples, possible, arrange_out)
        with nullcontext() if self.shards is None else self.shards.together(f"site {self.count} ({record.name})"):
            self._check_finite(record)
        self._keep(record, result)
        if size * max(lengths) > LONG:
            give_back()
        self.count += 1
        return record

    def _keep(self, record: Record, result: Tensor) -> None:
        """Remember a site; where it is to be differentiated by, also its result."""
        number = self.count
        self.records.append(record)
        if number == self.leaf:
            torch.set_grad_enabled(True)  # the caller restores it
        if self.keep_outputs or number == self.leaf:
            if not torch.is_grad_enabled():
                raise NoGradient(
                    f"site {number} ({record.name}) runs under torch.no_grad() inside the model, so nothing can be "
                    "differentiated by it. Take the no_grad block out, or trace without gradients."
                )
            if not result.requires_grad:
                result.requires_grad_()
            record.out = result

    def _sampled_rows(self, queries: int, device: torch.device) -> Tensor:
        """The middle and the last of the rows that are real in any example."""
        if queries not in self.sampled:
            sequence = self.batch.sequence_of(queries)
            rows: Sequence[int] = range(queries)
            if sequence is not None:
                rows = sequence.real.any(0).nonzero().squeeze(-1).tolist()
            self.sampled[queries] = torch.tensor(sorted({rows[len(rows) // 2], rows[-1]}), device=device)
        return self.sampled[queries]

    def _handed_on(self, result: Tensor) -> Tensor:
        """What the model goes on with. Where we differentiate by a result, it gets a copy: it may write into it."""
        return result.clone() if self.records and self.records[-1].out is result else result

    def _check_finite(self, record: Record) -> None:
        """Name NaN or Inf where it first comes up.

        NaN in keys or values shows in the output of the last real row; NaN in queries alone does not: kernels turn it
        into zeros. Padding rows may hold anything. What two rows do not show is found when the site is read.
        """
        rows, out = record.sample.rows, record.sample.out
        queries = record.source.queries[:, :, rows]
        if math.isfinite(queries.sum() + out.sum()):  # the usual case, at the price of two small sums
            return
        finite = queries.isfinite().all(-1).all(1) & out.isfinite().all(-1).all(1)
        if not (finite | ~self.real_rows(record, 2)[:, rows]).all():
            raise non_finite(f"site {self.count} ({record.name})")

    def real_rows(self, record: Record, axis: int) -> Tensor:
        """``(example, row)`` for queries (axis 2) or keys (3): False at padding, all True where they are not rows."""
        shape, device = record.source.shape, record.source.values.device
        if axis == 3 or not record.learned:  # learned queries are labels or slots, however many
            sequence = self.batch.sequence_of(shape[axis])
            if sequence is not None and len(sequence.real) == shape[0]:
                return sequence.real.to(device)
        return torch.ones(shape[0], shape[axis], dtype=torch.bool, device=device)

    def _module_name(self) -> str:
        """Path of the innermost module of the model whose code is running."""
        frame = sys._getframe(1)
        while frame is not None:
            first = frame.f_code.co_varnames[:1]
            if first and isinstance(owner := frame.f_locals.get(first[0]), nn.Module):
                name = self.names.get(id(owner))
                if name is not None:
                    return name.replace("_orig_mod.", "")
            frame = frame.f_back  # type: ignore[assignment]
        return ""


@lru_cache(maxsize=4096)
def relevant_name(func: Any) -> str | None:
    """``add`` for ``torch.add``, ``Tensor.add``, ``Tensor.add_`` and ``Tensor.__add__``; None if of no interest."""
    name = getattr(func, "__name__", "")
    if name == "__get__":  # a property, such as Tensor.T
        name = getattr(func.__self__, "__name__", "")
    name = str(name).strip("_")
    return name if name in FOLLOWED or "attention" in name or "attn" in name else None


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
    scale: float | None, grouped: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """What `F.scaled_dot_product_attention` returns, bit for bit, and the log-sum-exp where it can be had."""
    if query.device.type == "cpu" and query.dim() == 4 and not dropout and not torch.is_autocast_enabled("cpu"):
        kernel = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
        if kernel == FLASH:
            if mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, dropout, causal, attn_mask=mask, scale=scale
            )
            return out, lse.detach()
    out = F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=grouped)
    return out, None


def attend_again(source: Fused, dropout: float) -> Tensor:
    """What the kernel gives for other arguments than the model's."""
    grouped = source.q.shape[-3:-2] != source.k.shape[-3:-2]
    out, _ = attend(source.q, source.k, source.values, source.mask, dropout, source.causal, source.scale, grouped)
    return out


def writable(result: Tensor, view_of: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """A copy of a site's result, and a view of it: what is written into the view is written into the copy."""
    for layout in (torch.preserve_format, torch.contiguous_format):
        edited = result.clone(memory_format=layout)
        view = view_of(edited)
        if view.untyped_storage().data_ptr() == edited.untyped_storage().data_ptr():
            return edited, view
    raise NotReproduced(f"a site's result of shape {tuple(result.shape)} is laid out so that it cannot be edited.")


def readings(lead: tuple[int, ...], examples: int) -> tuple[Reading, ...]:
    """How ``(*lead, …)`` may be read as examples and heads, the likeliest first; none if it cannot be."""
    n = len(lead)
    if examples == 1:
        return ("single",)
    if n and lead[0] == examples:
        return ("plain", "swap") if n == 2 and lead[1] == examples else ("plain",)
    if n == 2 and lead[1] == examples:
        return ("swap",)
    if n == 1 and lead[0] % examples == 0:
        return ("fold", "refold")
    return ()


def arrange(x: Tensor, n: int, reading: Reading, examples: int) -> Tensor:
    """``(*lead, …)`` with ``n`` leading axes to ``(example, head, …)``; a view where ``x`` is contiguous."""
    if reading == "single" and (n < 2 or x.shape[0] != 1):
        return x.flatten(0, n - 1)[None] if n else x[None, None]
    if reading in ("plain", "single"):
        return x.unsqueeze(1) if n == 1 else x if n == 2 else x.flatten(1, n - 1)
    if reading == "swap":
        return x.transpose(0, 1)
    heads = x.shape[0] // examples
    if reading == "fold":
        return x.reshape(examples, heads, *x.shape[1:])
    return x.reshape(heads, examples, *x.shape[1:]).transpose(0, 1)
