"""One forward pass under a tape, with the model left as it was."""

from __future__ import annotations

import reprlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.attention.checkpoints import checkpointed
from regard.attention.inward import InwardTape
from regard.attention.onward import OnwardTape
from regard.attention.sharding import offloaded
from regard.attention.tape import Tape
from regard.errors import NoAttentionFound, NoGradient, OpaqueKernel, SubjectError, non_finite
from regard.types import Batch, Subject

# Gradients of longer batches keep only the inputs of blocks, at the price of one more forward pass.
ROWS_KEPT = 2048
Folds = Sequence[tuple[Callable[[Tensor], Tensor], int]] | None
Gradients = bool | Literal["edits"]  # by everything, by nothing, or by what edits hold
_lock = threading.Lock()
# how many blocks a model is in, and the modes of its modules before the first of them
_evaluated: WeakKeyDictionary[nn.Module, tuple[int, list[tuple[nn.Module, bool]]]] = WeakKeyDictionary()


def is_subject(subject: Any) -> bool:
    """Whether it has what a subject has."""
    return all(hasattr(subject, name) for name in ("model", "encode", "forward", "readout"))


def must_be_subject(subject: Any) -> None:
    """Refuse models and anything else that is no subject."""
    if not is_subject(subject):
        raise SubjectError(
            f"subject={reprlib.repr(subject)} is a {type(subject).__name__}, not a subject. Make one with regard.text, "
            "regard.causal, regard.seq2seq, regard.image, regard.pooled, regard.tabular or regard.module; estimators "
            "have theirs as .subject_."
        )


def batch_of(subject: Subject, inputs: Any) -> Batch:
    """Inputs as a batch; they may be one already."""
    must_be_subject(subject)
    return inputs if isinstance(inputs, Batch) else subject.encode(inputs)


def record(
    subject: Subject, batch: Batch, *, gradients: bool = False, onward: bool = False, inward: bool = False,
    leaf: int | None = None,
) -> tuple[Tape, Tensor]:  # fmt: skip
    """One forward pass under a tape. The caller keeps the model `undisturbed`."""
    tape = (InwardTape if inward else OnwardTape if onward else Tape)(
        subject.model, batch, keep_outputs=gradients, leaf=leaf
    )
    # a graph would keep the weights that were brought here for a moment (accelerate's offload)
    lean = gradients and (len(batch) * max(batch.lengths) > ROWS_KEPT or offloaded(subject.model))
    with checkpointed(subject.model) if lean else nullcontext():
        output = run(subject, batch, tape, gradients=gradients)
    if not tape.records:
        raise _nothing_found(subject.model, tape)
    if not output.detach().isfinite().all():
        broken = [entry.name for entry in tape.records if not entry.sample.out.isfinite().all()]
        where = f"first seen at site {broken[0]}" if broken else f"after the last site, {tape.records[-1].name}"
        raise non_finite(f"the model's output ({where})")
    return tape, output


def run(subject: Subject, batch: Batch, tape: Tape, *, gradients: Gradients) -> Tensor:
    """One forward pass under a given tape, which switches gradients by edits on where they begin."""
    if gradients and torch.is_inference_mode_enabled():
        raise NoGradient("gradients asked for inside torch.inference_mode(), where there are none. Leave that block.")
    try:
        with torch.set_grad_enabled(gradients is True), uncompiled(subject.model), tape:
            return subject.forward(batch)
    except Exception as problem:
        if type(problem).__module__.startswith("torch._dynamo"):
            raise OpaqueKernel(_advice("it runs compiled code (flex attention, say)", tape)) from problem
        raise


def mixes(subject: Subject, batch: Batch) -> bool:
    """Whether the examples of a batch look at each other, so that what is said of one depends on the others."""
    return len(batch) > 1 and getattr(subject, "mixes", False)


def own_gradients(values: Tensor, leaves: Sequence[Tensor], *, apart: bool, folds: Folds = None) -> list[Tensor | None]:
    """The gradient of each example's value by what is its own; None by a leaf that no value depends on.

    Args:
        values: ``(example,)``.
        leaves: what is differentiated by.
        apart: examples look at each other: each value is differentiated by itself, so that no example has what it did
            to others.
        folds: of each leaf how its gradient is arranged, and which axis is examples then; None: as it is, the first.
    """
    folds = folds or [(torch.Tensor.detach, 0)] * len(leaves)
    if not apart:
        slopes = torch.autograd.grad(values, leaves, torch.ones_like(values), allow_unused=True)
        return [None if slope is None else fold(slope) for slope, (fold, _) in zip(slopes, folds, strict=True)]
    found: list[Tensor | None] = [None] * len(leaves)
    for example, only in enumerate(torch.eye(len(values)).to(values)):
        slopes = torch.autograd.grad(values, leaves, only, allow_unused=True, retain_graph=True)
        for place, (slope, (fold, axis)) in enumerate(zip(slopes, folds, strict=True)):
            if slope is not None:
                whole = fold(slope)
                own = found[place] = torch.zeros_like(whole) if (held := found[place]) is None else held
                own.select(axis, example).copy_(whole.select(axis, example))
    return found


def must_differentiate(model: nn.Module) -> None:
    """Refuse models with integer-quantised layers: gradients would go around them, and be wrong without a word."""
    for what in quantised(model):
        raise NoGradient(f"{what}, which has no gradient.")


def quantised(model: nn.Module) -> Iterator[str]:
    """The integer-quantised layers of a model, in words."""
    for name, module in model.named_modules():
        if ".quantized." in type(module).__module__:
            yield f"{name} is an integer-quantised {type(module).__name__}"


def out_of_memory(problem: BaseException) -> bool:
    """Whether it failed for want of memory, so that less at a time may work."""
    return isinstance(problem, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(problem)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Eval mode for the length of a block; modes and random state are afterwards as they were.

    Blocks may nest and, in several threads, overlap: the first sets eval mode, the last one restores.
    """
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"} if torch.cuda.is_available() else ()
    with torch.random.fork_rng(devices=list(devices)):
        with _lock:
            blocks, modes = _evaluated.get(model, (0, []))
            if not blocks:
                # Flags are set one by one: `model.eval()` may do more than it says (merge adapters, for one).
                modes = [(module, module.training) for module in model.modules()]
                for module, _ in modes:
                    module.training = False
            _evaluated[model] = blocks + 1, modes
        try:
            yield
        finally:
            with _lock:
                blocks, modes = _evaluated.pop(model)
                if blocks > 1:
                    _evaluated[model] = blocks - 1, modes
                else:
                    for module, mode in modes:
                        module.training = mode


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Compiled modules run as they were written: compiled code shows no torch functions."""
    if not any(getattr(m, "_compiled_call_impl", None) or hasattr(m, "_orig_mod") for m in model.modules()):
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def _nothing_found(model: nn.Module, tape: Tape) -> NoAttentionFound:
    """The exception for a model in which no site was seen, with what can be said about why."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        return OpaqueKernel(_advice("parts of it are scripted (torch.jit.script)", tape))
    backend = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if backend not in (None, "sdpa", "eager"):
        return OpaqueKernel(_advice(f"its attention backend is {backend!r}", tape))
    if tape.opaque:
        return OpaqueKernel(_advice(f"it calls {', '.join(sorted(tape.opaque))}", tape))
    return NoAttentionFound(
        _advice("it has no softmax that mixes values over the rows of the input", tape, opaque=False)
    )


def _advice(reason: str, tape: Tape, *, opaque: bool = True) -> str:
    seen = "".join(f"\n  {entry.name} {entry.shape}: {entry.reason}" for entry in tape.ignored())
    return (
        f"no attention was seen in this model: {reason}. "
        + (
            "Load it with attn_implementation='sdpa' or 'eager', or the original module instead of a scripted or "
            "compiled one."
            if opaque
            else "If it has attention, docs/add-a-model.md says how to make it seen."
        )
        + (f" Seen and not taken for attention:{seen}" if seen else "")
    )
