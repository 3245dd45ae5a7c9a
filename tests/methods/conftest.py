"""Subjects that several files of tests use."""

from __future__ import annotations

import pytest
from oracles import REGIONS, ROWS, lxmert, stream_inputs

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
