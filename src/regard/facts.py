"""Facts that a language model is asked for: where their subject is, how the answer goes, whether the model gives it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.aligning import rows_of
from regard.attention import Trace
from regard.attention.running import undisturbed
from regard.data import Example
from regard.errors import InputError
from regard.types import Features


def speechless(subject: Any, seen: Trace) -> str | None:
    """Why no fact can be asked for: for ``cannot`` of probes that are about them."""
    if not hasattr(subject, "whole"):
        return "facts are texts that a model goes on with: it needs a decoder with its tokenizer (regard.causal)."
    if subject.verbalizer is not None:
        return "with a verbalizer the model speaks of classes: leave it out to ask for facts."
    return None


def subject_rows(features: Features, example: Example) -> list[int]:
    """The rows of the tokens of a fact's subject."""
    span = example.marks["facts"]["subject"]
    rows = [*rows_of(features, str(example.input), [span])[0]]
    if not rows:
        said = str(example.input)[slice(*span)]
        raise InputError(f"fact {example.id}: no token begins in the subject {said!r}. It may have been cut off.")
    return rows


def answer_tokens(subject: Any, example: Example) -> list[int]:
    """The tokens of the answer, as they would go on after the prompt."""
    prompt, answer = str(example.input), str(example.marks["facts"]["answer"]).strip()

    def ids(text: str) -> list[int]:
        return list(subject.tokenizer(text, add_special_tokens=False)["input_ids"])

    said = answer if prompt[-1:].isspace() else f" {answer}"
    before, whole = ids(prompt), ids(prompt + said)
    found = whole[len(before) :] if whole[: len(before)] == before else ids(said)
    if not found:
        raise InputError(f"fact {example.id}: the tokenizer makes no token of the answer {answer!r}.")
    return found


def knows(subject: Any, example: Example, output: Tensor) -> bool:
    """Whether what the model says, the most probable token at each step, begins with the whole answer.

    Args:
        subject: the model and how it is called.
        example: the fact.
        output: ``(token,)``: the logits of what comes after the prompt.
    """
    tokens = answer_tokens(subject, example)
    if int(output.argmax()) != tokens[0]:
        return False
    if len(tokens) == 1:
        return True
    ids = subject.encode([example.input]).inputs["input_ids"]
    # as long as each token is the most probable one, what was said so far is the answer so far: one pass tells
    told = torch.cat([ids, ids.new_tensor([tokens[:-1]])], 1)
    with torch.no_grad(), undisturbed(subject.model):
        outputs = subject.outputs(subject.of_ids(told), range(ids.shape[1] - 1, told.shape[1]))
    return bool(outputs.argmax(-1).tolist() == tokens)
