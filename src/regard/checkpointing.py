"""Training that can stop at any time: its state after each epoch, as safetensors, and the best model so far."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from regard.errors import InputError
from regard.jobs.files import make_folder, write_whole

FORMAT = "regard.training/1"


@dataclass(eq=False)
class Memory:
    """All that the rest of a training depends on.

    Args:
        model: what is trained.
        optimizer: what trains it.
        order: draws the order of examples.
        path: where it is kept after each epoch; None: nowhere.
        rows: the history, a row for each epoch.
        best: the best quality so far, and the model that had it; None where nothing is held out.
        since: how many epochs ago it became better.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    order: np.random.Generator
    path: Path | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    best: tuple[float, dict[str, Tensor] | None] = (-math.inf, None)
    since: int = 0

    def keep(self, row: dict[str, Any], quality: float | None) -> None:
        """An epoch is over: remember the model if it is the best, and write everything down."""
        self.rows.append(row)
        if quality is not None:
            self.since = 0 if quality > self.best[0] else self.since + 1
            if quality >= self.best[0]:  # of equals the last, which has learned more
                self.best = quality, _copied(self.model.state_dict())
        if self.path is not None:
            make_folder(self.path.parent)
            write_whole(self.path, self._written())

    def best_again(self) -> None:
        """The model as it was at its best; as it is, where nothing is held out."""
        if self.best[1] is not None:
            self.model.load_state_dict(self.best[1])

    def recall(self) -> None:
        """Go on from what is written, if there is something."""
        if self.path is None or not self.path.is_file():
            return
        data = self.path.read_bytes()
        try:
            tensors = load(data)
            plain = json.loads(_metadata(data)["regard"])
            if plain["format"] != FORMAT:
                raise InputError(f"checkpoint={str(self.path)!r} is of another version of regard. Delete it.")
            self.model.load_state_dict(_part(tensors, "model"))
            state: dict[int, dict[str, Any]] = {int(name): dict(some) for name, some in plain["state"].items()}
            for name, tensor in _part(tensors, "optimizer").items():
                number, _, what = name.partition(".")
                state.setdefault(int(number), {})[what] = tensor
            self.optimizer.load_state_dict({"state": state, "param_groups": plain["groups"]})
            self.order.bit_generator.state = plain["order"]
        except (SafetensorError, KeyError, ValueError, RuntimeError) as problem:
            raise InputError(
                f"checkpoint={str(self.path)!r} does not fit this training: {str(problem).splitlines()[0][:200]}. "
                "Delete it, and it begins anew."
            ) from problem
        torch.set_rng_state(tensors["random"])
        self.rows, self.since = plain["rows"], plain["since"]
        best = _part(tensors, "best")
        self.best = (-math.inf, None) if plain["best"] is None else (plain["best"], best or None)

    def _written(self) -> bytes:
        tensors = {f"model.{name}": one for name, one in _copied(self.model.state_dict()).items()}
        tensors |= {f"best.{name}": one for name, one in (self.best[1] or {}).items()}
        tensors["random"] = torch.get_rng_state()
        kept, numbers = self.optimizer.state_dict(), dict[str, dict[str, Any]]()
        for number, some in kept["state"].items():
            for name, one in some.items():
                if isinstance(one, Tensor):
                    tensors[f"optimizer.{number}.{name}"] = one.detach().clone().contiguous()
                else:
                    numbers.setdefault(str(number), {})[name] = one
        plain = {
            "format": FORMAT, "rows": self.rows, "since": self.since, "state": numbers, "groups": kept["param_groups"],
            "best": None if self.best[1] is None else self.best[0], "order": self.order.bit_generator.state,
        }  # fmt: skip
        return save(tensors, {"regard": json.dumps(plain)})


def _copied(state: dict[str, Any]) -> dict[str, Tensor]:
    """Tensors that share no memory, as safetensors wants them."""
    return {name: one.detach().clone().contiguous() for name, one in state.items()}


def _part(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{name}."): one for key, one in tensors.items() if key.startswith(f"{name}.")}


def _metadata(data: bytes) -> dict[str, str]:
    """What the head of a safetensors file says besides where its tensors are."""
    size = int.from_bytes(data[:8], "little")
    found: dict[str, str] = json.loads(data[8 : 8 + size])["__metadata__"]
    return found
