"""Activation checkpoints: what is recomputed in the backward pass must be recomputed as it was computed.

``backward()`` runs without any mode, so the recomputation of an edited model would be that of the unedited one:
silently wrong gradients. torch offers no door for this from outside, so the checkpoints that are open above a site, in
the Python frames, are told to recompute inside a context.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch.utils.checkpoint

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
