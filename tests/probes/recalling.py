"""Facts, and decoders of few words that were wired to answer them, for tests."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast

import regard
from regard.data import Dataset, Example

ANSWERS = ["dog", "cat", "tree", "river", "city", "king", "road", "sea"]


def fact(prompt, subject, answer):
    start = prompt.index(subject)
    return Example(prompt, marks={"facts": {"subject": (start, start + len(subject)), "answer": answer}})


def speaking(model, words):
    """A model as a decoder whose tokens are some words; "[PAD]" and "[UNK]" must be among them."""
    inner = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    told = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]", model_max_length=16)
    return regard.causal(model, told, padding_side="right")


def probed(name, subject, facts, *, draws=20, examples=None, seed=0, **options):
    """What one probe finds."""
    found = regard.heads(
        subject, Dataset.of(facts), probes=[(name, options)], draws=draws, examples=examples, seed=seed
    )
    return found.probed.popitem()[1]


def opinionated(build, tokenizer):
    """A random model that says one of a few words, without much doubt."""
    model = build(tokenizer)
    said = torch.zeros_like(model.lm_head.weight)
    places = tokenizer.convert_tokens_to_ids(ANSWERS)
    said[places] = 6 * torch.randn(len(places), 32, generator=torch.Generator().manual_seed(5)).to(said)
    model.lm_head.weight = nn.Parameter(said)
    return model
