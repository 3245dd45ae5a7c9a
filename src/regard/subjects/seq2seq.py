"""Encoder–decoders for translation and summaries: the scalar is about one token of what was produced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad
from torch.nn.utils.rnn import pad_sequence

from regard.attention.running import undisturbed
from regard.errors import (
    EmptyInput,
    InputError,
    NoSuchPart,
    OptionError,
    SubjectError,
    TooLong,
    whole_numbers,
)
from regard.subjects import targets
from regard.subjects.loading import expected, load, sourced
from regard.subjects.tokens import (
    OverLimit,
    Reader,
    as_list,
    check_options,
    check_vocabulary,
    decode,
    decoded_features,
    described,
    device_of,
    position_limit,
    single_token,
)
from regard.types import Batch, Features, How, Of, Score, Source, Special, Targets


@dataclass(frozen=True, eq=False)
class Seq2SeqSubject:
    """An encoder–decoder with its tokenizer. Made by `regard.seq2seq`.

    ``token`` is the produced token that is explained; negative numbers count from the end of each text.
    """

    model: nn.Module
    reader: Reader
    most: int
    special: Special
    token: int = -1

    __repr__ = described

    @property
    def tokenizer(self) -> Any:
        """The tokenizer."""
        return self.reader.tokenizer

    @property
    def predicts(self) -> bool:
        """There is always the token that was produced."""
        return True

    def at(self, token: int) -> Seq2SeqSubject:
        """The same subject, which explains another of the produced tokens."""
        (token,) = whole_numbers("token", token)
        return replace(self, token=token)

    def produced(self, inputs: Any) -> tuple[tuple[str, ...], ...]:
        """For each example the tokens that were produced, the mark of the end included: what ``token`` counts."""
        _, _, said = self._read(inputs)
        return tuple(tuple(self._decode([token]) for token in tokens) for tokens in said)

    def produce(
        self, inputs: Any, generate: int | None, continuation: str | None
    ) -> tuple[Batch, list[int], list[int]]:
        """A text and what is made of it, generated greedily or given: the batch, the decoder's rows, the tokens."""
        if not isinstance(inputs, str):
            raise InputError(f"inputs={inputs!r}: pass one text to have what is made of it explained.")
        if generate is not None and whole_numbers("generate", generate)[0] < 1:
            raise OptionError(f"generate={generate!r}: at least one token must be generated.")
        subject = replace(self, most=generate or self.most)
        source, features, said = subject._read(inputs if continuation is None else (inputs, continuation))
        said = [said[0][:generate]]
        return subject._batch(source, features, said), list(range(len(said[0]))), said[0]

    def outputs(self, batch: Batch, rows: Sequence[int]) -> Tensor:
        """``(row, token)`` logits at some rows of a single example."""
        logits: Tensor = self.model(**batch.inputs, use_cache=False).logits
        return logits[0, list(rows)]

    def encode(self, inputs: Any) -> Batch:
        """Texts, whose output is generated here, or (source, produced) pairs; to tensors on the model's device.

        Row t of the decoder takes the token before and predicts the produced token t; row 0 takes the start token.
        """
        return self._batch(*self._read(inputs))

    def probe(self, batch: Batch) -> Batch:
        """Two short texts of different lengths, with as many produced tokens as it takes to have this one."""
        least, limit = self.token + 1 if self.token >= 0 else -self.token, self.reader.limit
        most = least + 2 if limit is None else max(least, min(least + 2, limit))
        source, features, (_, some) = self._read([("a", "a"), ("a b c", "a b c")])
        return self._batch(source, features, [(some * size)[:size] for size in (least, most)])

    def forward(self, batch: Batch) -> Tensor:
        """``(example, token)`` logits at the row that predicts the token that is explained."""
        logits: Tensor = self.model(**batch.inputs, use_cache=False).logits
        rows = self._rows(batch).to(logits.device)
        return logits[torch.arange(len(batch), device=logits.device), rows]

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch without some rows ``(example, row)`` of the source."""
        return self.reader.without(batch, gone, how)

    def score(self, output: Tensor, target: Targets, of: Of) -> Score:
        """The scalar to explain."""
        return targets.score(self.head, output, target, of)

    def readout(self, batch: Batch, score: Score | None) -> Tensor:
        """``(example, row)``: the row that predicts the token that is explained."""
        return one_hot(self._rows(batch), batch.real.shape[1]).to(torch.get_default_dtype())

    def _read(self, inputs: Any) -> tuple[dict[str, Tensor], tuple[Features, ...], list[list[int]]]:
        """What the encoder is called with, what a person sees of it, and the produced tokens of each example."""
        texts = as_list(inputs)
        forced = [text[1] for text in texts if isinstance(text, tuple)]
        if forced and len(forced) < len(texts):
            raise InputError("inputs mixes texts and (source, produced) pairs: pass one kind at a time.")
        sources = [text if isinstance(text, str) else text[0] for text in texts]
        tensors, features = self.reader.read(sources, device_of(self.model), pairs=False)
        source = {name: tensors[name] for name in ("input_ids", "attention_mask")}
        return source, features, self._forced(forced) if forced else self._generated(source)

    def _forced(self, texts: list[str]) -> list[list[int]]:
        """The tokens of texts that the model is made to say, as it is trained on them."""
        limit, cut = self.reader.limit, self.reader.over_limit == "truncate" and self.reader.limit is not None
        options = {"truncation": cut, "max_length": limit if cut else None, "verbose": False}
        said: list[list[int]] = self.tokenizer(text_target=texts, **options)["input_ids"]
        for number, tokens in enumerate(said):
            if not set(tokens) - self._special_ids:
                raise EmptyInput(
                    f"inputs[{number}]: the produced text {texts[number]!r} has no tokens but special ones."
                )
            if self.reader.over_limit == "error" and limit is not None and len(tokens) > limit:
                raise TooLong(
                    f"inputs[{number}]: the produced text has {len(tokens)} tokens, but the model takes {limit}. "
                    "Pass over_limit='truncate' to cut it, or 'allow' to run it all the same."
                )
        return said

    def _generated(self, source: dict[str, Tensor]) -> list[list[int]]:
        """What the model says greedily, by its own settings otherwise, up to and with the mark of the end."""
        longest = self.most if self.reader.limit is None else min(self.most, self.reader.limit)
        generate: Any = self.model.generate
        with undisturbed(self.model), torch.no_grad():
            found = generate(
                **source,
                max_length=longest + 1,  # with the start token; max_new_tokens would complain of a model's max_length
                max_new_tokens=None,
                num_beams=1,
                num_return_sequences=1,
                do_sample=False,
                return_dict_in_generate=False,
                forced_eos_token_id=None,  # where we stop it, the model has not come to an end
            )
        config: Any = self.model.generation_config
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        said = []
        for tokens in found[:, 1:].tolist():
            last = next((place for place, token in enumerate(tokens) if token in ends), len(tokens) - 1)
            said.append(tokens[: last + 1])
        return said

    def _batch(self, source: dict[str, Tensor], features: tuple[Features, ...], said: list[list[int]]) -> Batch:
        """One teacher-forced pass: the decoder takes the start token and all that was produced but the last."""
        device, rows = source["input_ids"].device, max(map(len, said))
        seen = source["attention_mask"].bool()
        if rows == seen.shape[1]:
            # Sites are told apart by lengths: attention over the source must not look like attention over the rows.
            if rows == self.reader.limit:
                raise TooLong(
                    f"source and produced text both have {rows} tokens, as many as the model takes, so attention over "
                    "one cannot be told from attention over the other. Shorten one of them by a word."
                )
            source = {name: pad(tensor, (0, 1)) for name, tensor in source.items()}
            seen = pad(seen, (0, 1))
        taken = [[self._start, *tokens[:-1]] for tokens in said]
        ids = pad_sequence([torch.tensor(tokens) for tokens in taken], batch_first=True).to(device)
        lengths = torch.tensor([len(tokens) for tokens in said], device=device)
        real = torch.arange(rows, device=device) < lengths[:, None]
        mask = real.to(source["attention_mask"].dtype)
        inputs = {**source, "decoder_input_ids": ids, "decoder_attention_mask": mask}
        batch = Batch(inputs, real, tuple(map(self._features, taken)), source=Source(seen, features))
        # the most probable token need not be it: texts may be forced, and settings forbid or force tokens
        explained = tuple(tokens[row] for tokens, row in zip(said, self._rows(batch).tolist(), strict=True))
        return replace(batch, said=explained)

    def _rows(self, batch: Batch) -> Tensor:
        """``(example,)``: the row that predicts the token that is explained."""
        counts = batch.real.sum(-1)
        for example, count in enumerate(counts.tolist()):
            if not -count <= self.token < count:
                raise NoSuchPart(
                    f"token={self.token} is not there: inputs[{example}] has {count} produced tokens. "
                    f"Choose from 0 to {count - 1}, or from the end from -1 to -{count}."
                )
        return counts + self.token if self.token < 0 else torch.full_like(counts, self.token)

    def _features(self, taken: list[int]) -> Features:
        """The decoder's tokens and their words: generated tokens have no offsets."""
        special = [row == 0 or token in self._special_ids for row, token in enumerate(taken)]
        return decoded_features(self.tokenizer, taken, special, range(len(taken)))

    def _decode(self, tokens: list[int]) -> str:
        return decode(self.tokenizer, tokens)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        """An unknown word is a word all the same."""
        return frozenset(self.tokenizer.all_special_ids) - {self.tokenizer.unk_token_id}

    @cached_property
    def _start(self) -> int:
        """What the decoder takes first, as `generate` has it."""
        config: Any = self.model.generation_config
        for token in (config.decoder_start_token_id, config.bos_token_id):
            if token is not None:
                return int(token)
        raise SubjectError(
            f"{type(self.model).__name__} does not say which token its decoder starts with: set "
            "model.generation_config.decoder_start_token_id."
        )

    @cached_property
    def head(self) -> targets.Head:
        """What the columns of the output are: tokens."""
        return targets.Head("softmax", self._token, self._named)

    def _named(self, index: int) -> str:
        return self._decode([index])

    def _token(self, token: str) -> int:
        ids = self.tokenizer(text_target=token, add_special_tokens=False)["input_ids"]
        advice = "subject.produced(inputs) shows the tokens of a text; target may also be a token's id."
        return single_token(self.tokenizer, token, ids, advice)


@sourced
def seq2seq(
    model: nn.Module | str | Path,
    tokenizer: Any = None,
    *,
    special: Special = "keep",
    over_limit: OverLimit = "error",
    most: int = 64,
    trust_remote_code: bool = False,
) -> Seq2SeqSubject:
    """An encoder–decoder that translates or summarises (T5, BART, Marian) as a subject.

    Its inputs are texts, whose output is generated greedily, or (source, produced) pairs, where the model is made to
    say the second text. What is explained is one produced token, the last unless `Seq2SeqSubject.at` says which; its
    features are the tokens before it, and those of the source are in ``trace.source``. Sites are told apart by length:
    a source that is as long as what was produced gets one masked row more.

    Args:
        model: a live Hugging Face model, a local folder, a GGUF file, or a hub name.
        tokenizer: its tokenizer; loaded from beside the model when that is a path or name.
        special: what explanations do with special tokens: "keep", "drop", or "renormalise" over the others.
        over_limit: a text with more tokens than the model takes is an "error", "truncate"d, or "allow"ed.
        most: how many tokens are generated at most.
        trust_remote_code: run Python code that comes with the checkpoint.

    Example::

        subject = regard.seq2seq("path/to/t5-small")
        subject.produced("translate English to German: The house is small.")  # (('Das', 'Haus', 'ist', …, '</s>'),)
        t = regard.trace(subject.at(1), "translate English to German: The house is small.", gradients=True)
        cross = [site for site in t.sites if site.kind == "cross"]
        cross[-1].pull(t.at(1).readout)  # (example, source token): where it looks while it says 'Haus'
    """
    check_options(special, over_limit, "right")
    if most < 1:
        raise OptionError(f"most={most!r}: at least one token must be generated.")
    expected(model, ("translate",), trust_remote_code=trust_remote_code)
    live, tokenizer = load(model, tokenizer, "translate", trust_remote_code=trust_remote_code)
    check_vocabulary(live, tokenizer)
    reader = Reader(tokenizer, position_limit(live, tokenizer), over_limit, "right")
    return Seq2SeqSubject(live, reader, most, special)
