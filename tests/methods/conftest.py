"""Subjects that several files of tests use."""

from __future__ import annotations

import pytest
from oracles import REGIONS, ROWS, bert, lxmert, stream_inputs

import regard


@pytest.fixture(scope="session")
def two_streams():
    """A small LXMERT, the subject that it makes, and what it reads; the prediction is read from the first token."""
    model = lxmert()
    subject = regard.module(
        model, lambda model, **inputs: model(**inputs).pooled_output, features=[f"token {i}" for i in range(ROWS)],
        source=[f"region {i}" for i in range(REGIONS)], readout="first", output="embedding",
    )  # fmt: skip
    return model, subject, stream_inputs()


@pytest.fixture(scope="module")
def model(tokenizer):
    """A small BERT that classifies, in float64."""
    return bert(tokenizer)


@pytest.fixture(scope="module")
def subject(model, tokenizer):
    """That BERT; its prediction is read from [CLS]."""
    return regard.text(model, tokenizer)
