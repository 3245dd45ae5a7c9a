"""The same model with other numbers in it: in a copy that shares all other tensors, or for the length of a block.

The user's own model is never written to.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode, TorchFunctionMode

from regard.attention.replay import Call, Running, shadowed
from regard.attention.running import quantised, run, undisturbed
from regard.attention.shadowing import shadowing
from regard.attention.tape import Tape
from regard.errors import NotServed
from regard.types import Batch, Subject

Seed = tuple[int, ...]
# Which axis holds what is dropped as a whole, counted from the last.
DROPPED: dict[type[nn.Module], int] = {nn.Dropout: 1, nn.Dropout1d: 2, nn.Dropout2d: 3, nn.Dropout3d: 4}


@dataclass(frozen=True)
class Layer:
    """What runs after one attention site and before another.

    Args:
        name: its first module … its last.
        parameters: names of the parameters, each named once.
    """

    name: str
    parameters: tuple[str, ...]


def layers(subject: Subject, batch: Batch, most: int = sys.maxsize) -> list[Layer]:
    """All parameters of a model, cut between attention sites by when they are used; the bottom first.

    Where there would be more than ``most``, neighbours are one layer.

    A parameter belongs to the last call of the module that owns it, or of the nearest module around it that is called;
    what several modules share, to the last of them; what only the model itself owns, to the bottom.
    """
    model, tape = subject.model, Tape(subject.model, batch)
    calls: dict[int, int] = {id(model): 0}  # module → sites seen before; in the order of their last calls

    def called(call: Call, forward: Running) -> Any:
        module, _ = call[-1]
        calls.pop(module, None)
        calls[module] = tape.count
        return forward()

    with undisturbed(model), shadowed(model, called):
        run(subject, batch, tape, gradients=False)
    order = {module: place for place, module in enumerate(calls)}
    once = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, tuple[int, int, str, str]] = {}  # parameter → sites, place, owner, name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner = name.rpartition(".")[0]
        while id(module := model.get_submodule(owner)) not in calls:
            owner = owner.rpartition(".")[0]
        entry = (calls[id(module)], order[id(module)], owner or type(model).__name__, once[id(parameter)])
        found[id(parameter)] = max(entry, found.get(id(parameter), entry))
    cut, every = [], sorted({entry[0] for entry in found.values()})
    for sites in np.array_split(every, min(most, len(every))):
        inside = sorted(entry for entry in found.values() if entry[0] in sites)
        ends = dict.fromkeys((inside[0][2], inside[-1][2]))
        cut.append(Layer(" … ".join(ends), tuple(entry[3] for entry in inside)))
    return cut


def lookalike(subject: Subject, instead: Mapping[str, Tensor]) -> Any:
    """The subject with a copy of its model in which some parameters, by name, are others; all else is shared.

    Modules are copied, tensors are not. What the subject has found out about its model (the rows that are read, say) it
    keeps.
    """
    model = subject.model
    # what a deep copy has copied already, it does not copy again
    known: dict[int, Any] = {id(one): one for one in (*model.parameters(), *model.buffers())}
    known |= {id(one): one for module in model.modules() for one in vars(module).values() if isinstance(one, Tensor)}
    for name, tensor in instead.items():
        own = model.get_parameter(name)
        known[id(own)] = nn.Parameter(tensor.to(own), requires_grad=own.requires_grad)
    try:
        return with_model(subject, copy.deepcopy(model, known))
    except (RuntimeError, TypeError, AttributeError, NotImplementedError) as problem:
        raise NotServed(f"{type(model).__name__} cannot be copied: {type(problem).__name__}: {problem}") from problem


def with_model(subject: Any, model: nn.Module) -> Any:
    """The same subject of another model; what holds its model in an inner subject gets another one of these."""
    twin, inner = copy.copy(subject), getattr(subject, "inner", None)
    name, held = ("model", model) if inner is None else ("inner", with_model(inner, model))
    object.__setattr__(twin, name, held)  # subjects are frozen
    return twin


def redrawn(subject: Subject, seed: Seed) -> dict[str, Tensor]:
    """For each parameter, by name, one drawn from a normal distribution with its mean and standard deviation."""
    drawn: dict[str, Tensor] = {}
    for what in quantised(subject.model):
        raise NotServed(f"{what}, whose weights cannot be drawn.")
    for name, own in subject.model.named_parameters():
        if not own.is_floating_point():
            raise NotServed(f"{name} holds whole numbers ({own.dtype}), which cannot be drawn.")
        numbers = own.detach().float()
        normal = torch.randn(own.shape, generator=_seeded(seed, name)).to(numbers)
        drawn[name] = (numbers.mean() + numbers.std(correction=0) * normal).to(own) if own.numel() else own.detach()
    if not drawn:
        raise NotServed(f"{type(subject.model).__name__} has no parameters.")
    return drawn


class Trembling(TorchFunctionMode):
    """Words are embedded with Gaussian noise, for the length of a block.

    Each word of a table has its own, wherever it stands, so that all that a method runs is one model.

    Args:
        tables: whose words these are (see `Entrance.tables`).
        size: standard deviation of the noise, in those of the entries of a table.
        seed: of the noise.
    """

    def __init__(self, tables: Sequence[Tensor], size: float, seed: Seed) -> None:
        super().__init__()
        self.tables, self.seed = tables, seed
        self.sizes = [size * float(one.detach().float().std(correction=0)) for one in tables]
        self.known: dict[tuple[int, int], Tensor] = {}  # table, word → noise

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") != "embedding":
            return result
        ids, table = (*args, *(kwargs or {}).values())[:2]
        number = next((at for at, one in enumerate(self.tables) if one is table or _alike(one, table)), None)
        if number is None:
            return result
        words, places = ids.unique(return_inverse=True)
        noise = torch.stack([self._noise(number, word) for word in words.tolist()])
        return result + noise.to(result)[places]

    def _noise(self, number: int, word: int) -> Tensor:
        if (number, word) not in self.known:
            width = self.tables[number].shape[-1]
            drawn = torch.randn(width, generator=_seeded(self.seed, f"{number} {word}"))
            self.known[number, word] = self.sizes[number] * drawn
        return self.known[number, word]


def dropouts(subject: Subject, batch: Batch) -> dict[str, nn.Module]:
    """The dropout modules that a model calls, by name; not those that drop attention weights."""
    model, tape = subject.model, Tape(subject.model, batch)
    modules = {id(module): (name, module) for name, module in model.named_modules()}
    found: dict[str, nn.Module] = {}

    def called(call: Call, forward: Running) -> Any:
        name, module = modules[call[-1][0]]
        if type(module) in DROPPED and 0 < getattr(module, "p", 0) < 1:
            (given,) = (*forward.args, *forward.keywords.values())
            if not tape.follower.follows(given):
                found[name] = module
        return forward()

    with undisturbed(model), shadowed(model, called):
        run(subject, batch, tape, gradients=False)
    return found


@contextmanager
def dropping(modules: Mapping[str, nn.Module], seed: Seed) -> Iterator[None]:
    """These dropout modules drop, though the model does not train.

    Each drops the same channels of all rows and examples (Gal & Ghahramani 2016), so that all that a method runs is
    one model.
    """
    names = {id(module): name for name, module in modules.items()}

    def shadow(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        rate, axis = float(getattr(module, "p", 0)), DROPPED[type(module)]

        def instead(*args: Tensor, **kwargs: Tensor) -> Tensor:
            (x,) = (*args, *kwargs.values())
            kept = torch.rand(x.shape[-axis], generator=_seeded(seed, names[id(module)])) >= rate
            return x * (kept / (1 - rate)).to(x).view(-1, *[1] * (axis - 1))

        return instead

    # torch's fast path would go around the modules; it is left while any mode is there
    with BaseTorchFunctionMode(), shadowing(modules.values(), shadow):
        yield


def _alike(one: Tensor, other: Tensor) -> bool:
    """Whether a parameter holds the same: one that is kept elsewhere (accelerate's offload) comes anew each time."""
    return isinstance(other, nn.Parameter) and one.shape == other.shape and torch.equal(one, other)


def _seeded(seed: Seed, name: str) -> torch.Generator:
    plain = name.replace("_orig_mod.", "")  # a compiled model is given the same
    return torch.Generator().manual_seed(zlib.crc32(f"{seed} {plain}".encode()))
