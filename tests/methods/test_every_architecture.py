"""Every method on every architecture: an answer that does not depend on the batch, or a reason why there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

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
METHODS = [method for method in found().values() if method.family == "attention"]
# what needs one sequence, and what needs layers that are submodules
MAY_REFUSE = {"flow", "token_mixing", "value_zeroing"}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
def test_every_method_answers_or_says_why_not(name):
    architecture = ARCHITECTURES[name]
    subject = architecture.subject(architecture.build())
    batch = subject.encode(architecture.inputs(next(iter(architecture.sides))))
    last = batch.pick([len(batch) - 1])
    target = None if subject.predicts else some_scalar
    for method in METHODS:
        options = {"probes": 4} if method.name == "token_mixing" else {}
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
