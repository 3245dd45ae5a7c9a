"""Decoder language models: the scalar is about the next token."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from regard.attention.running import undisturbed
from regard.errors import EmptyInput, InputError, OptionError, SubjectError, TooLong, WrongTarget, whole_numbers
from regard.subjects import targets
from regard.subjects.loading import expected, load, sourced
from regard.subjects.tokens import (
    PROBE,
    OverLimit,
    Reader,
    check_options,
    check_vocabulary,
    decode,
    decoded_features,
    described,
    device_of,
    position_limit,
    single_token,
    spread,
)
from regard.types import Batch, Features, How, Of, Score, Special, Targets, Vocabulary


@dataclass(frozen=True, eq=False)
class CausalSubject:
    """A decoder language model with its tokenizer. Made by `regard.causal`."""

    model: nn.Module
    reader: Reader
    verbalizer: Mapping[str, str] | None
    special: Special
    row: int | None = None  # whose next token is explained; None: the last

    __repr__ = described

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.reader.tokenizer

    @property
    def predicts(self) -> bool:
        """There is always a most probable one."""
        return True

    def at(self, row: int) -> CausalSubject:
        """The same subject, which explains what comes after another row than the last."""
        return replace(self, row=row)

    def whole(self) -> WholeText:
        """The same model, asked about each token of a text instead of the next one."""
        return WholeText(self.model, self.reader, None, self.special)

    def produce(
        self, prompt: Any, generate: int | None, continuation: str | None
    ) -> tuple[Batch, list[int], list[int]]:
        """A prompt and what comes after it, generated greedily or given.

        Returns:
            The batch of one teacher-forced pass over all tokens but the last, the rows that predict what comes after
            the prompt, and these tokens.
        """
        if self.verbalizer is not None:
            raise WrongTarget("with a verbalizer the output is a distribution over its classes, not over tokens.")
        batch = self.encode(prompt)
        if len(batch) != 1:
            raise InputError(f"inputs has {len(batch)} prompts: pass one at a time to have its continuation explained.")
        ids = batch.inputs["input_ids"]
        if generate is not None and whole_numbers("generate", generate)[0] < 1:
            raise OptionError(f"generate={generate!r}: at least one token must be generated.")
        if continuation is None:
            said = self._generated(batch.inputs, generate or 1)
        else:
            said = self.tokenizer(continuation, add_special_tokens=False)["input_ids"][:generate]
        if not said:
            raise EmptyInput(f"continuation={continuation!r}: there is no token to explain.")
        count, limit = ids.shape[1] + len(said) - 1, self.reader.limit
        if limit is not None and count > limit and self.reader.over_limit != "allow":
            raise TooLong(f"prompt and continuation have {count} tokens, but the model takes {limit}.")
        taken, odd = said[:-1], set(self.tokenizer.all_special_ids)
        later = decoded_features(self.tokenizer, taken, [token in odd for token in taken], range(len(taken)))
        mask = batch.real.new_ones(1, count)
        tensors = {
            "input_ids": torch.cat([ids, ids.new_tensor([taken])], 1), "attention_mask": mask.to(ids.dtype),
        }  # fmt: skip
        if "position_ids" in batch.inputs:
            tensors["position_ids"] = torch.arange(count, device=ids.device)[None]
        rows = list(range(ids.shape[1] - 1, count))
        return Batch(tensors, mask, (batch.features[0].followed_by(later),)), rows, list(said)

    def outputs(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """``(row, token)`` logits at some rows of a single example."""
        wanted = torch.tensor(rows)
        kept = {"logits_to_keep": wanted} if "logits_to_keep" in self._accepts else {}
        logits: Tensor = self.model(**batch.inputs, **self._uncached, **kept).logits[0]
        return logits if kept else logits[wanted]

    def _generated(self, inputs: Mapping[str, Any], most: int) -> list[int]:
        generate: Any = self.model.generate
        with undisturbed(self.model), torch.no_grad():
            found = generate(
                input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], max_new_tokens=most,
                do_sample=False, num_beams=1, num_return_sequences=1, return_dict_in_generate=False,
                temperature=None, top_p=None, top_k=None, pad_token_id=self.tokenizer.pad_token_id,
            )  # fmt: skip
        said: list[int] = found[0, inputs["input_ids"].shape[1] :].tolist()
        return said

    def encode(self, inputs: Any) -> Batch:
        """Prompts to tensors on the model's device; positions count real tokens only."""
        tensors, features = self.reader.read(inputs, device_of(self.model), pairs=False)
        mask = tensors["attention_mask"]
        tensors = {"input_ids": tensors["input_ids"], "attention_mask": mask}
        if "position_ids" in self._accepts:
            tensors["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
        return Batch(tensors, mask.bool(), features)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """What texts may be made of: all tokens but special and added ones."""
        odd = {*self.tokenizer.all_special_ids, *self.tokenizer.get_added_vocab().values()}
        ids = [token for token in range(len(self.tokenizer)) if token not in odd]
        return Vocabulary(torch.tensor(ids), self.tokenizer.bos_token_id)

    def of_ids(self, ids: Tensor) -> Batch:
        """Numbers of tokens ``(example, row)`` as a batch; each token counts as a word."""
        limit, ids = self.reader.limit, ids.to(device_of(self.model))
        if limit is not None and ids.shape[1] > limit and self.reader.over_limit != "allow":
            raise TooLong(f"ids: {ids.shape[1]} tokens in a row, but the model takes {limit}.")
        odd = {decode(self.tokenizer, [token]) for token in self.tokenizer.all_special_ids}
        names = [[decode(self.tokenizer, [token]) for token in row] for row in ids.tolist()]
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if "position_ids" in self._accepts:
            tensors["position_ids"] = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return Batch(tensors, ids >= 0, tuple(Features.named(row, range(len(row)), odd) for row in names))

    def probe(self, batch: Batch) -> Batch:
        """Two short prompts, one of them padded."""
        return self.encode(PROBE)

    def forward(self, batch: Batch) -> Tensor:
        """Next-token logits ``(example, token)``, or ``(example, class)`` with a verbalizer."""
        options = dict(self._uncached)
        last = self.readout(batch, None).argmax(-1)  # the row that is read
        if bool((last == last[0]).all()) and "logits_to_keep" in self._accepts:
            options["logits_to_keep"] = last[:1]  # all logits of 8,192 tokens would take 1.6 GB
        logits: Tensor = self.model(**batch.inputs, **options).logits
        if logits.dim() != 3:
            raise SubjectError(
                f"{type(self.model).__name__} returns logits of shape {tuple(logits.shape)}, not one row for each "
                "token. Use regard.text for classifiers."
            )
        rows = torch.full_like(last, logits.shape[1] - 1) if logits.shape[1] == 1 else last
        logits = logits[torch.arange(len(rows), device=logits.device), rows.to(logits.device)]
        if self.verbalizer is None:
            return logits
        return logits[:, [self._token(token) for token in self.verbalizer.values()]]

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch without some rows ``(example, row)``; what comes after the row that is read is deleted, too."""
        if self.row is not None and how == "delete":
            gone = gone | (torch.arange(gone.shape[1], device=gone.device) > self.row)
        return self.reader.without(batch, gone, how)

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain."""
        return targets.score(self.head, output, target, of)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: the last real token predicts the next, or the one that was chosen, where it is there."""
        last = spread("last", batch.real)
        return last if self.row is None else one_hot(last.argmax(-1).clamp_max(self.row), last.shape[1]).to(last)

    @cached_property
    def _uncached(self) -> dict[str, Any]:
        return {"use_cache": False} if "use_cache" in self._accepts else {}

    @cached_property
    def _accepts(self) -> frozenset[str]:
        return frozenset(inspect.signature(self.model.forward).parameters)

    @cached_property
    def head(self) -> targets.Head:
        """What the columns of the output are: classes, or tokens."""
        if self.verbalizer is not None:
            return targets.named_head("softmax", tuple(self.verbalizer))
        return targets.Head("softmax", self._token, self._named)

    def _named(self, index: int) -> str:
        return str(self.tokenizer.decode([index]))

    def _token(self, token: str) -> int:
        ids = self.tokenizer(token, add_special_tokens=False)["input_ids"]
        advice = f"Most words are one token with the space before them: try {' ' + token.strip()!r}."
        return single_token(self.tokenizer, token, ids, advice)


@dataclass(frozen=True, eq=False, repr=False)
class WholeText(CausalSubject):
    """A decoder that is asked how probable each token of its text is. Made by `CausalSubject.whole`."""

    @property
    def predicts(self) -> bool:
        """It judges a text, and predicts nothing."""
        return False

    def forward(self, batch: Batch) -> Tensor:
        """``(example, row)``: log p of the token after each row; 0 at padding and where none comes after."""
        logits: Tensor = self.model(**batch.inputs, **self._uncached).logits[:, :-1]
        said = logits.log_softmax(-1).gather(-1, batch.inputs["input_ids"][:, 1:, None].to(logits.device))[..., 0]
        said = said.clamp_max(-torch.finfo(said.dtype).tiny)  # a token that is certain is there all the same
        real = batch.real.to(said.device)
        return torch.nn.functional.pad(said * (real[:, 1:] & real[:, :-1]), (0, 1))

    def probe(self, batch: Batch) -> Batch:
        """Two short texts, one of them padded, in which a token comes after another."""
        return self.encode([f"a {text}" for text in PROBE])

    @staticmethod
    def mean(output: Tensor) -> Tensor:
        """A target: the mean log p of the tokens of each text; 0 where none comes after another."""
        return output.sum(-1) / (output != 0).sum(-1).clamp_min(1)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: all rows but the last, alike."""
        others = batch.real & ~spread("last", batch.real).bool()
        return spread("mean", others.where(others.any(-1, keepdim=True), batch.real))

    @cached_property
    def head(self) -> targets.Head:
        """No classes: targets are functions of the output."""
        return targets.Head("embedding", targets.no_place, str)


@sourced
def causal(
    model: nn.Module | str | Path,
    tokenizer: Any = None,
    *,
    verbalizer: Mapping[str, str] | None = None,
    special: Special = "keep",
    over_limit: OverLimit = "error",
    padding_side: Literal["left", "right"] = "left",
    trust_remote_code: bool = False,
) -> CausalSubject:
    """A decoder language model as a subject.

    Args:
        model: a live Hugging Face model, a local folder, a GGUF file, or a hub name.
        tokenizer: its tokenizer; loaded from beside the model when that is a path or name.
        verbalizer: class names and the token that speaks for each, ``{"positive": " good", "negative": " bad"}``;
            the output is then the distribution over these.
        special: what explanations do with special tokens: "keep", "drop", or "renormalise" over the others.
        over_limit: a prompt with more tokens than the model takes is an "error", "truncate"d, or "allow"ed.
        padding_side: where shorter prompts are padded.
        trust_remote_code: run Python code that comes with the checkpoint.

    Example::

        subject = regard.causal("SmolLM2-135M-Instruct.Q4_1.gguf")
        regard.trace(subject, "The capital of France is", target=" Paris", gradients=True)
        regard.trace(subject, "The capital of France is", target=(" Paris", " Rome"), of="logprob")
    """
    check_options(special, over_limit, padding_side)
    expected(model, ("generate", "encode"), trust_remote_code=trust_remote_code)
    live, tokenizer = load(model, tokenizer, "generate", trust_remote_code=trust_remote_code)
    check_vocabulary(live, tokenizer)
    if verbalizer is not None and len(verbalizer) < 2:
        raise WrongTarget(f"verbalizer={dict(verbalizer)!r} needs at least two classes.")
    reader = Reader(tokenizer, position_limit(live, tokenizer), over_limit, padding_side)
    subject = CausalSubject(live, reader, verbalizer, special)
    for token in (verbalizer or {}).values():
        subject._token(token)
    return subject
