"""The two streams of the command line: results, and everything else."""

from __future__ import annotations

import json as jsons
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

shown = Console()
# Progress and complaints go to stderr, so that stdout can be piped.
told = Console(stderr=True)


def print_json(found: Any) -> None:
    """The one thing on stdout."""
    sys.stdout.write(jsons.dumps(found, indent=2, ensure_ascii=False) + "\n")


def tell(said: str, style: str = "dim", *, wrap: bool = False) -> None:
    """A sentence beside the results, as it is: no markup, and a path is not broken; ``wrap``: on a terminal it is."""
    told.print(said, style=style, markup=False, highlight=False, soft_wrap=not (wrap and told.is_terminal))


def tell_written(path: Path) -> None:
    """Where something was written to."""
    tell(f"written: {path}")
