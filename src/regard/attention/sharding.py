"""Models whose heads are spread over processes (tensor parallelism): who holds which, and what the others are told.

Every process runs the same program on the same inputs, and holds as many heads of a site as every other: process 0 the
first, and so on. What is asked of all heads is computed where they are; what travels is the sum over processes of a
result that is small already, such as ``(example, key)`` for a mean over heads. A model in one process has no shards,
and nothing here is run for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from hashlib import blake2b
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

from regard.errors import InputError, NoSuchPart, NotServed, SeamError
from regard.types import Batch

PATIENCE = timedelta(minutes=5)  # how long a process waits for the others to make the same call
WHOLE = 'Load the model in one process: device_map="auto" spreads it over several devices, too.'
Reduction = Literal["sum", "max", "min"]
# Whether what is put in the place of weights needs all heads of a row at once; if one comes in their place, what it is
# of those that some of them give: the sum, the largest, the smallest; or the same for any heads. True: none of these.
Together = bool | Literal["sum", "max", "min", "same"]
_meetings: Counter[tuple[int, ...]] = Counter()  # of the processes of a group, so far


@dataclass(frozen=True, eq=False)
class Shards:
    """The processes that a model is spread over, as this one sees them.

    Args:
        model: the model.
        group: the process group, with whose members everything is exchanged.
        rank: the number of this process among them.
        size: how many they are.
        device: the kind of device that it is on, of which each process has one as its current one.
    """

    model: nn.Module
    group: Any
    rank: int
    size: int
    device: str

    def of_site(self, name: str, held: int) -> Shard | None:
        """Which heads of a site this process holds, given how many; None: all, as every other does."""
        heads = _declared_heads(self.model, name)
        if heads == held:
            return None
        if heads != held * self.size:
            raise NotServed(
                f"{name} has {held} heads in each of {self.size} processes, and its configuration says {heads}: which "
                f"of them are held where cannot be told. {WHOLE}"
            )
        return Shard(self, heads, range(self.rank * held, (self.rank + 1) * held))

    def reduced(self, x: Tensor, how: Reduction = "sum") -> Tensor:
        """The sum of what all processes have, or its largest or smallest."""
        total = torch.empty_like(x, device=self.device, memory_format=torch.contiguous_format).copy_(x.detach())
        dist.all_reduce(total, getattr(dist.ReduceOp, how.upper()), self.group)
        return total.to(x.device)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What fails in one process fails in all of them: the others would wait for it for hours."""
        problem: Exception | None = None
        try:
            yield
        except Exception as raised:
            problem = raised
        failed = self.reduced(torch.tensor([float(problem is not None)], device=self.device))
        if problem is not None:
            raise problem
        if failed.item():
            raise SeamError(f"{what} failed in another process of the {self.size}, which says why.")


@dataclass(frozen=True, eq=False)
class Shard:
    """The heads of one site that this process holds.

    Args:
        shards: the processes.
        heads: how many heads the site has in all.
        held: the numbers of those that are here.
    """

    shards: Shards
    heads: int
    held: range

    def places(self, heads: slice, where: str) -> slice:
        """Numbers of heads as places among those that are here."""
        first, end = self.held.start, self.held.stop
        if not first <= heads.start <= heads.stop <= end:
            raise NoSuchPart(
                f"{where}: this process holds heads {first} to {end - 1}, not {heads.start} to {heads.stop - 1}. "
                "weights(), gradients() and pull() have those of all processes."
            )
        return slice(heads.start - first, heads.stop - first)

    def of_all(self, x: Tensor) -> Tensor:
        """``(example, head, …)`` of the heads that are here, to those of all."""
        result = x.new_zeros(x.shape[0], self.heads, *x.shape[2:])
        result[:, self.held.start : self.held.stop] = x
        return self.shards.reduced(result)

    def among(self, heads: Tensor) -> tuple[Tensor, Among]:
        """Those of some heads that are here, by their places here, and by those among all of them."""
        places = ((heads >= self.held.start) & (heads < self.held.stop)).nonzero().squeeze(-1)
        return heads[places] - self.held.start, Among(self.shards, places, len(heads))

    def joined(self, result: Tensor, together: Together, r: Tensor | None) -> Tensor:
        """What all processes make of their heads; ``r`` ``(example, row)``: what rows were summed by, if they were."""
        if together == "same":
            return result
        single = r is None or not bool((r < 0).any() or (r > 0).sum(-1).max() > 1)
        # the largest of sums over rows is not the sum of the largest
        if together is True or (together in ("max", "min") and not single):
            raise NotServed(f"it takes all heads of a row at once: these are in {self.shards.size} processes. {WHOLE}")
        return self.shards.reduced(result, "sum" if together is False else together)


@dataclass(frozen=True, eq=False)
class Among:
    """Those of the edited heads of a site that this process holds.

    Args:
        shards: the processes.
        places: ``(head,)``: which of the edited heads they are.
        total: how many are edited in all.
    """

    shards: Shards
    places: Tensor
    total: int

    def held(self, every: Tensor) -> Tensor:
        """``(…, head, ·, ·)`` of all edited heads, to those that are held here."""
        shared: Tensor = _Shared.apply(every, self.shards)  # type: ignore[no-untyped-call]
        return shared.index_select(-3, self.places.to(every.device))


class _Shared(torch.autograd.Function):
    """The same in every process; what each finds as its gradient is a part of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards) -> Tensor:
        ctx.shards = shards
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shards.reduced(gradients[0]), None


def shards_of(model: nn.Module) -> Shards | None:
    """The processes that a model is spread over; None: it is all here."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    mesh = next((one.device_mesh for one in model.parameters() if isinstance(one, DTensor)), None)
    if mesh is None:
        return None
    if "tp" in (mesh.mesh_dim_names or ()):
        mesh = mesh["tp"]
    elif any(isinstance(module, FSDPModule) for module in model.modules()):  # each process has its own inputs
        return None
    if mesh.ndim > 1:
        raise NotServed(f'the model is spread over {mesh}, of which no axis is called "tp". {WHOLE}')
    if mesh.size() == 1:
        return None
    _must_divide(model, mesh.size())
    return Shards(model, mesh.get_group(), mesh.get_local_rank(), mesh.size(), mesh.device_type)


def agree(model: nn.Module, batch: Batch) -> None:
    """Before anything runs: all processes that hold the model are here, with the same inputs."""
    if (shards := shards_of(model)) is None:
        return
    digest = blake2b(digest_size=16)
    for name, one in sorted(batch.inputs.items()):
        if isinstance(one, Tensor):
            digest.update(f"{name} {one.dtype} {tuple(one.shape)}".encode())
            digest.update(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    members = tuple(dist.get_process_group_ranks(shards.group))
    store, meeting = dist.distributed_c10d._get_default_store(), _meetings[members]
    _meetings[members] += 1

    def keys(meeting: int) -> list[str]:
        return [f"regard/{members}/{meeting}/{rank}" for rank in range(shards.size)]

    store.set(keys(meeting)[shards.rank], digest.hexdigest())
    try:
        store.wait(keys(meeting), PATIENCE)
    except RuntimeError:
        there = [rank for rank, key in enumerate(keys(meeting)) if store.check([key])]
        raise InputError(
            f"of the {shards.size} processes that hold this model only {there} have made this call within "
            f"{PATIENCE.total_seconds():.0f} seconds. Make the same calls in every process."
        ) from None
    said = [store.get(key) for key in keys(meeting)]
    if meeting > 1:  # the others have read that one
        store.delete_key(keys(meeting - 2)[shards.rank])
    if odd := [rank for rank, one in enumerate(said) if one != said[0]]:
        raise InputError(f"processes {odd} have other inputs than process 0. Pass the same in every process.")


def must_be_whole(model: nn.Module, what: str) -> None:
    """Refuse what cannot be done with a model that is spread over processes."""
    if (shards := shards_of(model)) is not None:
        raise NotServed(f"{what}: the heads of the model are spread over {shards.size} processes. {WHOLE}")


def offloaded(model: nn.Module) -> bool:
    """Whether some weights are kept elsewhere until they are needed (accelerate's offload)."""
    return any(parameter.is_meta for parameter in model.parameters())


def stored(model: nn.Module, name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer of a model, from where it is kept."""
    path, _, own = name.rpartition(".")
    hook: Any = getattr(model.get_submodule(path), "_hf_hook", None) if tensor.is_meta else None
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "weights_map", None) is not None:
            kept: Tensor = one.weights_map[own]
            return kept
    return tensor


def part_here(x: Tensor) -> Tensor:
    """What this process holds of a tensor that is spread over several."""
    own: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return own


def whole(x: Tensor) -> Tensor:
    """What a part of the model that is spread over processes has computed, put together."""
    together: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return together


def in_place_of(x: Tensor, result: Any) -> Tensor:
    """``x``, the same in all processes, as the model takes it in place of its own result."""
    if not hasattr(result, "full_tensor"):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    mesh = result.device_mesh
    return DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _must_divide(model: nn.Module, size: int) -> None:
    """Heads are cut between processes, never through a head: transformers fails later, on a shape."""
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    cut = {name.rsplit(".", 1)[-1] for name, style in plan.items() if style == "colwise"}
    for name, projection in (("num_attention_heads", "q_proj"), ("num_key_value_heads", "k_proj")):
        heads = getattr(config, name, None)
        if projection in cut and isinstance(heads, int) and heads % size:
            raise NotServed(
                f"{name}={heads} cannot be spread evenly over {size} processes. Start as many as divide {heads} "
                f"(torchrun --nproc-per-node), or load the model with device_map instead of tp_plan."
            )


def _declared_heads(model: nn.Module, name: str) -> int | None:
    """How many heads the configuration of a module says, or that of the innermost one around it."""
    parts = name.split(".")
    around = {".".join(parts[:end]) for end in range(len(parts) + 1)}
    found = {path: module for path, module in model.named_modules() if path in around}
    for _, module in sorted(found.items(), reverse=True):  # the longest path first
        heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
        if isinstance(heads, int):
            return heads
    return None
