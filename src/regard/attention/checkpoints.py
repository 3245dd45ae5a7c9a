"""Activation checkpoints: what is recomputed in the backward pass must be recomputed as it was computed.

``backward()`` runs without any mode, so the recomputation of an edited model would be that of the unedited one:
silently wrong gradients. torch offers no door for this from outside, so the checkpoints that are open above a site, in
the Python frames, are told to recompute inside a context.

Long inputs are traced with checkpoints of our own: only gradients at the sites are asked for, so nothing inside a block
needs to be kept.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Any

import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from regard.attention.shadowing import shadowing
from regard.attention.sharding import offloaded
from regard.memory import give_back

CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__
REENTRANT = torch.utils.checkpoint.CheckpointFunction.forward.__code__


def open_checkpoints() -> Iterator[tuple[Any, str]]:
    """The checkpoints whose function is running: what holds the function of the recomputation, and its attribute."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CHECKPOINT and "gen" in frame.f_locals:
            yield frame.f_locals["gen"].gi_frame.f_locals["new_frame"], "recompute_fn"
        elif frame.f_code is REENTRANT:
            yield frame.f_locals["ctx"], "run_function"
        frame = frame.f_back


def recompute_inside(context: Callable[[set[int]], AbstractContextManager[Any]], site: int) -> bool:
    """Have every open checkpoint recompute inside a context, which is told the sites in it; whether there is one."""
    found = False
    for holder, attribute in open_checkpoints():
        found = True
        function = getattr(holder, attribute)
        if not hasattr(function, "sites"):
            function = _inside(context, function)
            setattr(holder, attribute, function)
        function.sites.add(site)
    return found


def _inside(context: Callable[[set[int]], AbstractContextManager[Any]], function: Callable[..., Any]) -> Any:
    sites: set[int] = set()

    def recompute(*args: Any) -> Any:
        with context(sites):
            return function(*args)

    recompute.sites = sites  # type: ignore[attr-defined]
    return recompute


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Of each block of the model keep only what goes in; what lies inside is computed again in the backward pass.

    Blocks are the entries of the outermost lists of modules; their `forward` is shadowed on the instance, as in replay.
    """
    started, moving = False, offloaded(model)

    def shadow(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def instead(*args: Any, **kwargs: Any) -> Any:
            nonlocal started
            given = pytree.tree_leaves((args, kwargs))
            if not started and not any(isinstance(one, Tensor) and one.requires_grad for one in given):
                # the recomputation sees no tape, so it cannot be the tape that makes a leaf inside
                args, kwargs, _ = with_leaf(args, kwargs)
            started = True
            # stopped early, a submodule would not give back the weights that were brought here for it
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False, "early_stop": not moving}
            result = torch.utils.checkpoint.checkpoint(forward, *args, **options, **kwargs)
            give_back()  # measured: a quarter of the peak otherwise
            return result

        return instead

    with shadowing(blocks_of(model), shadow):
        yield


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The entries of the outermost lists of at least two modules."""
    if isinstance(model, nn.ModuleList) and len(model) > 1:
        return [block for block in model if not isinstance(block, (nn.ModuleDict, torch.jit.ScriptModule))]
    return [block for child in model.children() for block in blocks_of(child)]


def with_leaf(args: Any, kwargs: Any) -> tuple[Any, Any, Tensor]:
    """The same arguments, the first state of rows among them being the leaf of a graph; and that leaf."""
    flat, tree = pytree.tree_flatten((args, kwargs))
    place = next(place for place, one in enumerate(flat) if is_state(one))
    flat[place] = flat[place].detach().requires_grad_()
    return (*pytree.tree_unflatten(flat, tree), flat[place])


def is_state(given: Any) -> bool:
    """Whether it may be the state of rows: three axes, of which examples and rows come first."""
    return isinstance(given, Tensor) and given.is_floating_point() and given.dim() == 3
