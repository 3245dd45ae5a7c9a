"""Read attention from any PyTorch model, turn it into explanations, and put those explanations on trial."""

from importlib.metadata import version

from regard import draw, errors, models
from regard.attention import Trace, edits, intervene, trace
from regard.catalog import list_methods
from regard.diagnosis import diagnose
from regard.explaining import explain
from regard.explanation import Explanation, load_explanation
from regard.methods.token_mixing import identifiability
from regard.ranking import Patterns, patterns
from regard.subjects import causal, image, module, pooled, seq2seq, text

__version__ = version("regard")
__all__ = [
    "Explanation", "Patterns", "Trace", "causal", "diagnose", "draw", "edits", "errors", "explain", "identifiability",
    "image", "intervene", "list_methods", "load_explanation", "models", "module", "patterns", "pooled", "seq2seq",
    "text", "trace",
]  # fmt: skip
