"""Every method on every architecture: an answer that does not depend on the batch, or a reason why there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from regard.attention.reading import some_scalar
from regard.catalog import found
from regard.errors import NotServed

sys.path.append(str(Path(__file__).parents[1] / "attention"))
from architectures import ARCHITECTURES

pytestmark = [
    # DeBERTa-v2 scripts two functions when its module is imported
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]
# what takes long, with less; what a module has no tokens for, without
OPTIONS = {
    "token_mixing": {"probes": 4}, "shapley": {"samples": 2}, "integrated_gradients": {"baseline": "zero", "steps": 3},
}  # fmt: skip
SINGLE = {"Gemma-2", "Mixtral", "GPT-OSS"}  # parts of which are float32 whatever the model is
# what needs one sequence, and what needs layers that are submodules
MAY_REFUSE = {"flow", "token_mixing", "value_zeroing"}


def made(name, dtype):
    """A subject and a batch of three."""
    architecture = ARCHITECTURES[name]
    inputs = architecture.inputs(next(iter(architecture.sides)))
    inputs = {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
    subject = architecture.subject(architecture.build().to(dtype))
    return subject, subject.encode(inputs)


@pytest.mark.parametrize("family", ["attention", "reference"])
@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_method_answers_or_says_why_not(name, family):
    # references are differences of outputs and slopes, which cancel: of float32 too little would be left
    exact = family == "reference" and name not in SINGLE
    subject, batch = made(name, torch.float64 if exact else torch.float32)
    last = batch.pick([len(batch) - 1])
    target = None if subject.predicts else some_scalar
    for method in [one for one in found().values() if one.family == family]:
        options = OPTIONS.get(method.name, {})
        refused = None
        try:
            together = regard.explain(subject, batch, method=method.name, target=target, **options)[-1].scores
        except NotServed as problem:
            refused = str(problem)
        if refused is not None:
            assert method.name in MAY_REFUSE, refused
            assert "Methods that can: " in refused
            continue
        alone = regard.explain(subject, last, method=method.name, target=target, **options)[0].scores
        assert np.abs(together).max() > 0, method.name
        np.testing.assert_allclose(together, alone, rtol=0, atol=1e-4 * np.abs(alone).max(), err_msg=method.name)
