"""What fits into memory, asked before it is tried."""

from __future__ import annotations

import ctypes
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.errors import TooLarge

OVERHEAD = 1 << 29  # bytes of Python with torch
WORTH = 20 << 20  # bytes of a model, below which a process takes longer to start than it saves
LESS = "Ask for the readout only (matrix=False), for a shorter input, or for fewer examples."


def must_fit(what: str, shape: Sequence[int], *, item: int = 4, advice: str = LESS) -> None:
    """Refuse to form a tensor that would not fit into the memory that is free now, with what it would need."""
    needed, free = math.prod(shape) * item, _free()
    if needed > free:
        raise TooLarge(
            f"{what} needs {needed / 2**30:.1f} GiB ({' × '.join(map(str, shape))} numbers), but {free / 2**30:.1f} "
            f"GiB are free. {advice}"
        )


def give_back() -> None:
    """Return what was freed to the system, where the C library can: long-lived tensors between others keep it else."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def peak() -> int:
    """The most bytes that this process has held so far; 0 where the system does not tell."""
    try:
        import resource
    except ImportError:
        return 0
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most << 10


def processes(weights: int) -> int:
    """How many processes that each hold a model of so many bytes: one for each core, as far as half the memory goes."""
    if weights < WORTH:
        return 1
    return min(os.cpu_count() or 1, room_for(2 * weights))


def weight(model: Any) -> int:
    """Bytes of a model's parameters."""
    return sum(one.numel() * one.element_size() for one in model.parameters())


def room_for(size: int) -> int:
    """How many processes that each hold so many bytes go into half the memory; one at least."""
    return max(1, _free() // 2 // (size + (1 << 30)))  # and Python with torch


def _free() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux: all there is
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
