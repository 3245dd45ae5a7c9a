"""Read attention from any PyTorch model, turn it into explanations, and put those explanations on trial."""

from importlib.metadata import version

from regard import draw, errors, models
from regard.attention import Trace, edits, intervene, trace
from regard.diagnosis import diagnose
from regard.subjects import causal, image, module, pooled, seq2seq, text

__version__ = version("regard")
__all__ = [
    "Trace", "causal", "diagnose", "draw", "edits", "errors", "image", "intervene", "models", "module", "pooled",
    "seq2seq", "text", "trace",
]  # fmt: skip
