"""Texts to token tensors and back to what a person sees: words, special tokens, limits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from regard.errors import EmptyInput, InputError, NotServed, TokenizerMismatch, TooLong, WrongTarget, choose
from regard.subjects.removing import replaced, shortened
from regard.types import Batch, Features, How

Text = str | tuple[str, str]
OverLimit = Literal["error", "truncate", "allow"]
PROBE: list[Text] = ["a", "a b c"]  # short, and one of them padded


def as_list(inputs: Any, *, pairs: bool = True) -> list[Text]:
    """One text or pair, or several, as a list; refuses what is no text or holds none."""
    if isinstance(inputs, str) or (isinstance(inputs, tuple) and all(isinstance(part, str) for part in inputs)):
        inputs = [inputs]
    if isinstance(inputs, Mapping) or hasattr(inputs, "columns"):
        raise InputError(f"inputs is a {type(inputs).__name__}: pass one column of it, such as inputs['text'].")
    if not isinstance(inputs, Iterable):
        raise InputError(f"inputs={inputs!r} is not a text or a list of texts.")
    inputs = list(inputs)
    if not inputs:
        raise EmptyInput("inputs is empty: pass at least one text.")
    for number, text in enumerate(inputs):
        parts = text if isinstance(text, tuple) and len(text) == 2 and pairs else (text,)
        if not all(isinstance(part, str) for part in parts):
            wanted = "a text or a pair of texts" if pairs else "a text"
            raise InputError(f"inputs[{number}]={text!r} is not {wanted}.")
        if not all(part.strip() for part in parts):
            raise EmptyInput(f"inputs[{number}]={text!r} is empty: there is nothing to attend to.")
    return list(inputs)


def described(subject: Any) -> str:
    """What a subject is, in a line: a notebook would print all of its model otherwise."""
    return f"{type(subject).__name__}({type(subject.model).__name__})"


def position_limit(model: nn.Module, tokenizer: Any) -> int | None:
    """The most tokens that model and tokenizer say they take."""
    config = getattr(model, "config", None)
    said = [getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None)]
    limits = [limit for limit in said if isinstance(limit, int) and 0 < limit < 10**9]
    limits += [  # tables of positions that begin to count after the padding's, as RoBERTa's
        module.num_embeddings - module.padding_idx - 1
        for module in model.modules()
        if isinstance(module, nn.Embedding) and module.num_embeddings == said[0] and module.padding_idx is not None
    ]
    return min(limits, default=None)


@dataclass(frozen=True, eq=False)
class Reader:
    """A tokenizer with its policies: texts in, tensors and features out.

    Args:
        tokenizer: one of the tokenizers library knows character offsets; others give words by what tokens decode to.
        limit: the most tokens the model takes.
        over_limit: what to do with a longer text.
        padding_side: where shorter texts are padded.
    """

    tokenizer: Any
    limit: int | None
    over_limit: OverLimit
    padding_side: str

    def read(
        self, inputs: Any, device: torch.device, *, pairs: bool = True
    ) -> tuple[dict[str, Tensor], tuple[Features, ...]]:
        """What the model is called with, and what a person sees of each example."""
        texts = as_list(inputs, pairs=pairs)
        encoding = self._encode(texts)
        features = features_of(self.tokenizer, encoding, texts)
        ours = ("offset_mapping", "special_tokens_mask")
        return {name: value.to(device) for name, value in encoding.items() if name not in ours}, features

    def without(self, batch: Batch, gone: Tensor, how: How) -> Batch:
        """The batch with some rows ``(example, row)`` deleted, or another token in their place."""
        padding = self.tokenizer.pad_token_id
        padding = self.tokenizer.eos_token_id or 0 if padding is None else padding
        if how == "delete":
            fill = {"input_ids": padding, "attention_mask": 0, "token_type_ids": 0}
            return shortened(batch, gone, fill, side=self.padding_side)
        token = self.tokenizer.mask_token_id if how == "mask" else padding
        if token is None:
            raise NotServed("how='mask': the tokenizer has no mask token. Use 'delete', 'pad' or 'attention'.")
        return replaced(batch, gone, "input_ids", token)

    def _encode(self, texts: list[Text]) -> Any:
        """A transformers encoding with offsets, within the limit."""
        tokenizer, cut = self.tokenizer, self.over_limit == "truncate" and self.limit is not None
        if len({type(text) for text in texts}) > 1:
            raise InputError("inputs mixes single texts and pairs: pass one kind at a time.")
        first = [text if isinstance(text, str) else text[0] for text in texts]
        second = None if isinstance(texts[0], str) else [text[1] for text in texts]
        before = tokenizer.pad_token
        if before is None and tokenizer.eos_token is None and len(texts) > 1:
            raise TokenizerMismatch("the tokenizer has no padding token: set tokenizer.pad_token, or pass one text.")
        try:
            if before is None:  # what is masked may be any token; the tokenizer is afterwards as it was
                tokenizer.pad_token = tokenizer.eos_token
            encoding = tokenizer(
                first,
                second,
                padding=len(texts) > 1,
                padding_side=self.padding_side,
                truncation=cut,
                max_length=self.limit if cut else None,
                return_offsets_mapping=bool(getattr(tokenizer, "is_fast", False)),
                return_special_tokens_mask=True,
                return_attention_mask=True,
                return_tensors="pt",
                verbose=False,
            )
        finally:
            if before is None:
                tokenizer.pad_token = None
        lengths = encoding["attention_mask"].sum(-1)
        if self.over_limit == "error" and self.limit is not None and lengths.max() > self.limit:
            raise TooLong(
                f"inputs[{int(lengths.argmax())}] has {int(lengths.max())} tokens, but the model takes {self.limit}. "
                "Pass over_limit='truncate' to cut it, or 'allow' to run it all the same."
            )
        return encoding


def features_of(tokenizer: Any, encoding: Any, texts: list[Text]) -> tuple[Features, ...]:
    """Tokens, their rows and their words, for each example.

    A word ends where the tokenizer's own pre-tokenizer ends it, and at any white space: byte-level and
    sentence-piece tokenizers report one or the other.
    """
    special = encoding["special_tokens_mask"].bool()
    # an unknown word is a word all the same
    known = torch.tensor(sorted({*tokenizer.all_special_ids} - {tokenizer.unk_token_id}), dtype=torch.long)
    special |= torch.isin(encoding["input_ids"], known)
    # lists: a tensor's single elements are slow
    every_id, every_odd, every_mask = (x.tolist() for x in (encoding["input_ids"], special, encoding["attention_mask"]))
    offsets = encoding["offset_mapping"].tolist() if "offset_mapping" in encoding else None
    names: dict[int, str] = {}
    found = []
    for number, text in enumerate(texts):
        ids, odd = every_id[number], every_odd[number]
        rows = [row for row, seen in enumerate(every_mask[number]) if seen]
        if offsets is None:
            found.append(decoded_features(tokenizer, [ids[row] for row in rows], [odd[row] for row in rows], rows))
            continue
        words: list[str] = []
        word: list[int | None] = []
        word_ids, parts = encoding.word_ids(number), encoding.sequence_ids(number)
        last: tuple[Any, Any, int] | None = None  # part of the pair, pre-tokenizer's word, end
        for row in rows:
            if odd[row]:
                word.append(None)
                continue
            part = parts[row] or 0
            source = text if isinstance(text, str) else text[part]
            start, end = offsets[number][row]
            inside = source[start:end]
            start += len(inside) - len(inside.lstrip())  # byte-level tokens begin with their space
            if start == end and words:  # white space alone belongs to the word before it
                word.append(len(words) - 1)
                continue
            gap = source[last[2] : start] if last is not None and last[0] == part else " "
            if last is not None and last[:2] == (part, word_ids[row]) and not any(map(str.isspace, gap)):
                words[-1] += source[last[2] : end]
            else:
                words.append(source[start:end] or inside)
            word.append(len(words) - 1)
            last = (part, word_ids[row], max(end, last[2]) if last is not None and last[0] == part else end)
        names |= {ids[row]: tokenizer.decode([ids[row]]) for row in rows if ids[row] not in names}
        tokens = tuple(names[ids[row]] for row in rows)
        spans = tuple(tuple(offsets[number][row]) for row in rows) if isinstance(text, str) else ()
        found.append(Features(tokens, tuple(rows), tuple(words), tuple(word), spans=spans))
    for text, features in zip(texts, found, strict=True):
        if not features.words:
            raise EmptyInput(f"inputs[{texts.index(text)}]={text!r} has no tokens but special ones.")
    return tuple(found)


def decoded_features(tokenizer: Any, ids: list[int], special: list[bool], rows: Sequence[int]) -> Features:
    """Tokens and their words, which end at white space, where nothing is known but what the tokens say together."""
    shown = [token for token, odd in zip(ids, special, strict=True) if not odd]
    words = (decode(tokenizer, shown).split() or [""]) if shown else []
    ends = list(accumulate(map(len, words)))  # in letters, not counting white space
    letters = (len("".join(decode(tokenizer, shown[: count + 1]).split())) for count in range(len(shown)))
    word = (min(bisect_left(ends, count), len(words) - 1) for count in letters)
    tokens = tuple(decode(tokenizer, [token]) for token in ids)
    return Features(tokens, tuple(rows), tuple(words), tuple(None if odd else next(word) for odd in special))


def single_token(tokenizer: Any, token: str, ids: list[int], advice: str) -> int:
    """The id of a string that is exactly one token."""
    if len(ids) != 1:
        pieces = ", ".join(repr(decode(tokenizer, [index])) for index in ids)
        raise WrongTarget(f"target={token!r} is {len(ids)} tokens ({pieces}), not one. {advice}")
    return int(ids[0])


def decode(tokenizer: Any, ids: list[int]) -> str:
    """What tokens say, with white space as it is."""
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def check_options(special: str, over_limit: str, padding_side: str) -> None:
    """Refuse what is not one of the choices."""
    choose("special", special, ("keep", "drop", "renormalise"))
    choose("over_limit", over_limit, ("error", "truncate", "allow"))
    choose("padding_side", padding_side, ("left", "right"))


def device_of(model: nn.Module) -> torch.device:
    """Where the inputs go: to the embedding. A model spread over devices moves the rest itself."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    parameter: Tensor | None = next((embedding or model).parameters(), None)
    if parameter is not None and parameter.device.type != "meta":
        return parameter.device
    # weights that are kept elsewhere (accelerate's offload) come to a device of their own when they are needed
    hooks = (getattr(module, "_hf_hook", None) for module in (embedding or model).modules())
    devices = (getattr(hook, "execution_device", None) for hook in hooks)
    return torch.device(next((device for device in devices if device is not None), "cpu"))


def check_vocabulary(model: nn.Module, tokenizer: Any) -> None:
    """The tokenizer's ids must be rows of the model's embedding, and nearly all of its rows."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    rows = getattr(embedding, "num_embeddings", None)
    if rows is None:
        return
    size = len(tokenizer)
    if size > rows:
        raise TokenizerMismatch(
            f"the tokenizer knows {size} tokens, but the model embeds {rows}: it belongs to another model. "
            "Load both from the same place, or resize the model's embeddings."
        )
    if size < 0.9 * rows:  # embeddings are padded to round sizes, by a few per cent at most
        raise TokenizerMismatch(
            f"the tokenizer knows {size} tokens of the {rows} that the model embeds: it belongs to another model. "
            "Load both from the same place."
        )


def spread(kind: str, real: Tensor) -> Tensor:
    """``(example, row)`` readout: on the first real row, the last, or all of them alike."""
    if kind == "mean":
        return real / real.sum(-1, keepdim=True)
    position = real.long().cumsum(-1)
    chosen = position == (1 if kind == "first" else position[:, -1:])
    return (chosen & real).to(torch.get_default_dtype())
