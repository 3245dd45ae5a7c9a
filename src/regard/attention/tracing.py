"""What did attention do in this forward pass?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsIndex

import pandas as pd
import torch
from torch import Tensor

from regard.attention.inward import inward_of
from regard.attention.onward import onward_of
from regard.attention.reading import verify_readout
from regard.attention.recognise import Ignored
from regard.attention.running import batch_of, must_differentiate, own_gradients, record, undisturbed
from regard.attention.settling import settle
from regard.attention.sharding import agree, must_be_whole
from regard.attention.sites import Kind, Site, Strand
from regard.attention.sources import at_least_float
from regard.attention.state_edits import At
from regard.attention.states import States, kept_state, reading, wanted
from regard.attention.tape import Record, Tape
from regard.errors import NoGradient, NoSuchPart, choose, whole_numbers
from regard.types import Batch, Features, Of, Score, Source, Special, Subject, Targets, one_by_one

FRAME = ("site", "kind", "heads", "shape", "entropy", "special_share", "error")


class Sites(tuple[Site, ...]):
    """The sites of a trace, in order of execution; indexed by number or by name."""

    def __getitem__(self, key: SupportsIndex | slice | str) -> Any:
        """One site by number or name, or several by slice."""
        if isinstance(key, str):
            found = [site for site in self if site.name == key]
            if len(found) == 1:
                return found[0]
            listed = ", ".join(f"{site.index}: {site.name}" for site in self)
            problem = "is not there" if not found else f"runs {len(found)} times: choose by number"
            raise NoSuchPart(f"site {key!r} {problem}. There are {listed}.")
        try:
            return super().__getitem__(key)
        except IndexError:
            listed = ", ".join(f"{site.index}: {site.name}" for site in self)
            raise NoSuchPart(f"site {key} is not there. There are {listed}.") from None


@dataclass(frozen=True, eq=False)
class Check:
    """The evidence that a trace is right.

    Args:
        sites: the sites; each is proved when it is first read, which costs a few rows.
        readout: "measured" if the rows that move the output are those of the readout; otherwise why it could
            not be measured.
        left_fast_path: torch's fast path of `nn.TransformerEncoder` or `nn.MultiheadAttention` cannot be seen into
            and was left by itself, so outputs agree to about 1e-6 with a plain run; otherwise bit for bit.
    """

    sites: Sites
    readout: str
    left_fast_path: bool

    @property
    def errors(self) -> tuple[float, ...]:
        """For each site max |A·V − out| / max |out|, on two rows of every head of a few examples."""
        return tuple(site.proof.error for site in self.sites)

    @property
    def masses(self) -> tuple[tuple[float, float], ...]:
        """For each site the smallest and largest row sum on those rows (below 1 with sink logits)."""
        return tuple(site.proof.mass for site in self.sites)

    @property
    def error(self) -> float:
        """The largest reconstruction error of all sites."""
        return max(self.errors)

    def __repr__(self) -> str:
        return f"Check(error={self.error:.2g}, readout={self.readout!r}, left_fast_path={self.left_fast_path})"


@dataclass(frozen=True, eq=False)
class Trace:
    """What flowed through the attention sites in one run.

    Args:
        sites: in order of execution.
        readout: ``(example, row)``: from which query rows of the last site the prediction is read; sums to 1.
        subject: what was run.
        batch: what it was run on.
        output: what the model said, ``(example, class)``.
        target: what is explained; what was predicted, if nothing else was asked for.
        score: the scalar that is explained, if there is a target.
        of: which function of the output the scalar is.
        check: the evidence that the trace is right.
        ignored: what looked like attention and was not taken for it, with reasons.
        states: hidden states, if they were asked for; see `state`.
    """

    sites: Sites
    readout: Tensor
    subject: Subject
    batch: Batch
    output: Tensor
    target: Targets
    score: Score | None
    of: Of
    check: Check
    ignored: tuple[Ignored, ...]
    states: States = field(default_factory=dict)

    def __repr__(self) -> str:
        examples, rows = self.real.shape
        return f"Trace({len(self.sites)} sites, {examples} example(s) of up to {rows} rows)"

    @property
    def real(self) -> Tensor:
        """``(example, row)``, False at padding."""
        return self.batch.real

    @property
    def features(self) -> tuple[Features, ...]:
        """What a person sees of each example."""
        return self.batch.features

    @property
    def source(self) -> Source | None:
        """The second sequence, in models that have two."""
        return self.batch.source

    @property
    def special(self) -> Special:
        """What explanations are to do with special tokens."""
        return self.subject.special

    def special_keys(self, site: Site) -> Tensor:
        """``(example, key)``: True where a special token sits among the keys of a site."""
        return special_keys(self.batch, site.shape[3])

    def state(self, layer: int | Strand, at: At = "block") -> Tensor:
        """``(example, row, channel)``: a hidden state; padding rows hold anything.

        Args:
            layer: number of a site; at the entrance "rows", or "source".
            at: "block": after the block of that site; "attention": what its attention adds to that; "mlp": what the
                rest of the block adds (see `regard.attention.outlets`); "entrance": the vectors that the input enters
                as.
        """
        return kept_state(self.states, layer, at)

    def at(self, token: int) -> Trace:
        """The same trace read from another row: that of ``features[example].tokens[token]``, in every example.

        In decoders that is the row which predicts the token after it; in `regard.seq2seq` row k predicts the produced
        token k. The score belongs to the row that was traced, so there is none; output and gradients remain that row's.
        """
        (token,), counts = whole_numbers("token", token), self.real.sum(-1)
        if self.readout.shape != self.real.shape or any(site.rows is not None for site in self.sites):
            raise NoSuchPart(f"token={token}: the model computes only the row that is read, so no other can be chosen.")
        if not -int(counts.min()) <= token < int(counts.min()):
            raise NoSuchPart(f"token={token} is not there in every example: they have {counts.tolist()} tokens.")
        place = counts + token if token < 0 else torch.full_like(counts, token)
        chosen = (self.real.cumsum(-1) == place[:, None] + 1) & self.real
        check = replace(self.check, readout=f"not measured: token {token} was chosen")
        return replace(self, readout=chosen.to(self.readout), score=None, check=check)

    def until(self, row: int) -> Trace:
        """The same trace of a model that looks only back, as if the input had ended at this row."""
        upto = torch.arange(self.real.shape[1], device=self.real.device) <= row
        batch = replace(self.batch, real=self.real & upto, features=tuple(one.until(row) for one in self.features))

        def cut(real: Tensor) -> Tensor:
            return real & upto.to(real.device) if real.shape[1] == len(upto) else real

        sites = [replace(site, real=cut(site.real), real_keys=cut(site.real_keys)) for site in self.sites]
        for site, whole in zip(sites, self.sites, strict=True):
            vars(site)["proof"] = whole.proof
        return replace(self, sites=Sites(sites), batch=batch)

    def looks(self) -> Tensor:
        """``(site, example, head, key)``: where the readout looks, for traces whose sites all have the same shape.

        The readout row of each site's weights; with several readout rows their mean, weighted as the readout is.
        """
        shapes = sorted({site.shape for site in self.sites})
        if len(shapes) > 1:
            raise NoSuchPart(
                f"the sites have different shapes, {shapes}: use site.pull(readout, per_head=True) for each."
            )
        return torch.stack([site.pull(self.readout, per_head=True).to(self.real.device) for site in self.sites])

    def reads(self, site: Site) -> bool:
        """Whether the rows of the readout are among the queries of a site; an encoder's are not, for one."""
        example, _, query, _ = site.shape
        return example == len(self.readout) and (site.rows is not None or query == self.readout.shape[1])

    def frame(self) -> pd.DataFrame:
        """A row for each site: name, kind, heads, shape, entropy, share on special tokens, reconstruction error.

        Entropy and share are those of the readout rows, mean over heads and examples; NaN for sites whose queries or
        keys are not rows of the input.
        """
        rows = []
        for site in self.sites:
            entropy = share = float("nan")
            if self.reads(site):
                entropy = float(site.entropy(self.readout).mean())
                looks = site.pull(self.readout)
                share = float((looks * self.special_keys(site).to(looks.device)).sum(-1).mean())
            row = (site.name, site.kind, site.heads, site.shape, entropy, share, site.proof.error)
            rows.append(dict(zip(FRAME, row, strict=True)))
        return pd.DataFrame(rows)


def trace(
    subject: Subject,
    inputs: Any,
    *,
    gradients: bool = False,
    onward: bool = False,
    inward: bool = False,
    states: bool | At | Sequence[At] = False,
    target: Targets = None,
    of: Of = "logit",
) -> Trace:
    """Run the subject once and keep what its attention did.

    The model runs as it always does, in eval mode, on its own backend and device, and is afterwards as it was.

    Args:
        subject: made by `regard.text`, `regard.causal`, `regard.seq2seq`, `regard.image`, `regard.pooled` or
            `regard.module`.
        inputs: what the subject takes: a text, a list of texts, pictures, tensors; or a batch it has encoded.
        gradients: also keep ∂target/∂(A·V) of each site, for `Site.gradients`.
        onward: also follow what becomes of each site's result, its output projection above all, for `Site.onward`.
        inward: also follow where queries, keys and values come from, for `Site.inward`; `Site.onward` is there, too.
        states: also keep hidden states, for `Trace.state`: "block", "attention", "mlp", "entrance", several, or True.
        target: the class, label, token, pair or function of the output to explain; None: what is predicted.
        of: "logit", "probability" or "logprob" of the target.

    Example:
        >>> import regard
        >>> subject = regard.pooled(regard.models.toys.decisive())
        >>> t = regard.trace(subject, "so so good so")
        >>> t.sites[0].weights().shape  # (example, head, query, key)
        torch.Size([1, 1, 1, 4])
    """
    choose("of", of, ("logit", "probability", "logprob"))
    if onward or inward:
        must_be_whole(subject.model, "onward=True" if onward else "inward=True")
    return traced(
        subject, batch_of(subject, inputs), gradients=gradients, onward=onward, inward=inward, target=target, of=of,
        states=wanted(states),
    )  # fmt: skip


def traced(
    subject: Subject, batch: Batch, *, gradients: bool, onward: bool, target: Targets, of: Of,
    verified: str | None = None, inward: bool = False, states: Sequence[At] = (),
) -> Trace:  # fmt: skip
    """The trace of an encoded batch; ``verified``: how the readout is known, if it need not be measured again."""
    if gradients:
        must_differentiate(subject.model)
    agree(subject.model, batch)
    with undisturbed(subject.model):
        with reading(subject, batch, states) as kept:
            tape, output = record(subject, batch, gradients=gradients, onward=onward, inward=inward)
        score = None
        if gradients or target is not None or subject.predicts:
            with torch.set_grad_enabled(gradients):
                score = subject.score(output, batch.explained(target), of)
        settle(subject, batch, tape)
        out_gradients = _differentiate(tape, score) if gradients and score is not None else None
        target = batch.explained(target)
        if score is not None and not callable(target):  # what was predicted stays the target when something else is
            pairs = zip(one_by_one(target, len(batch)), score.index, strict=True)
            target = [entry if index is None else index for entry, index in pairs]
        score = score and replace(score, values=score.values.detach())
        readout = subject.readout(batch, score)
        verified = verified or verify_readout(subject, batch)
    sites = sites_of(tape, readout, out_gradients)
    check = Check(sites, verified, tape.left_fast_path)
    return Trace(sites, readout, subject, batch, output.detach(), target, score, of, check, tape.ignored(), kept)


def sites_of(tape: Tape, readout: Tensor, out_gradients: list[Tensor] | None = None) -> Sites:
    """The sites that a tape has recorded."""
    sites = []
    for index, entry in enumerate(tape.records):
        gradient = gate = None
        shard = None if tape.shards is None else tape.shards.of_site(entry.name, entry.source.shape[1])
        if out_gradients is not None and entry.out is not None:
            gradient = out_gradients[index]
            gate = torch.einsum(
                "ehqc,ehqc->eh", at_least_float(gradient), at_least_float(entry.fold(entry.out.detach()))
            )
            gate = gate if shard is None else shard.of_all(gate)
        kind, rows = _kind(entry, readout, tape.batch), _rows_of_queries(entry, readout)
        real, keys = tape.real_rows(entry, 2), tape.real_rows(entry, 3)
        maps = onward_of(tape, entry, index), inward_of(tape, entry, index)
        known = (rows, gradient, gate, *maps, shard)
        sites.append(Site(index, entry.name, kind, entry.source, real, keys, entry.sample, *known))
    return Sites(sites)


def special_keys(batch: Batch, keys: int) -> Tensor:
    """``(example, key)``: True where a special token sits among so many keys, which tell the sequence."""
    sequence = batch.sequence_of(keys)
    special = torch.zeros(len(batch), keys, dtype=torch.bool, device=batch.real.device)
    for example, entry in enumerate(sequence.features if sequence else ()):
        special[example, [row for row, odd in zip(entry.rows, entry.special, strict=True) if odd]] = True
    return special


def _differentiate(tape: Tape, score: Score) -> list[Tensor]:
    """∂score/∂(A·V) of every site ``(example, head, query, channel)``; 0 where the score does not depend on it."""
    records = [(entry, entry.out) for entry in tape.records if entry.out is not None]
    folds = [(entry.fold, 2 if entry.across else 0) for entry, _ in records]
    mixed = any(entry.across for entry, _ in records)
    if not score.values.requires_grad:
        raise NoGradient(
            f"the target {score.names[0]!r} has no gradient with respect to attention: it is detached from the "
            "model's output, or the model runs under torch.no_grad()."
        )
    try:
        found = own_gradients(score.values, [out for _, out in records], apart=mixed, folds=folds)
    except RuntimeError as problem:
        if "use_reentrant" not in str(problem):
            raise
        raise NoGradient(
            "the model checkpoints its activations with use_reentrant=True, which cannot be differentiated by single "
            "tensors. Use use_reentrant=False, or switch checkpointing off."
        ) from problem
    if all(gradient is None for gradient in found):
        raise NoGradient(f"the target {score.names[0]!r} does not depend differentiably on any attention site.")
    return [
        entry.fold(torch.zeros_like(out)) if one is None else one.detach()
        for (entry, out), one in zip(records, found, strict=True)
    ]


def _kind(entry: Record, readout: Tensor, batch: Batch) -> Kind:
    """By which sequences the queries and keys are rows of."""
    _, _, query, key = entry.source.shape
    if entry.across:
        return "samples"
    asked = query == readout.shape[1] and query in batch.queries  # a subject that pools says so
    if entry.learned or asked or (query == 1 and key > 1 and readout.shape[1] == 1 and batch.source is None):
        return "pool"
    if query != key and _rows_of_queries(entry, readout) is None:
        return "cross"
    if batch.source is None:
        return "self"
    return "encoder" if key == batch.source.real.shape[1] else "decoder"


def _rows_of_queries(entry: Record, readout: Tensor) -> Tensor | None:
    """``(example, 1)``: where a model computes a single row of a self-attention, it is the one that is read."""
    _, _, query, key = entry.source.shape
    if query == 1 and readout.shape[1] == key > 1 and bool((readout.count_nonzero(-1) == 1).all()):
        return readout.argmax(-1, keepdim=True)
    return None
