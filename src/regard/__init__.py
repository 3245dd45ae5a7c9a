"""Read attention from any PyTorch model, turn it into explanations, and put those explanations on trial."""

from importlib.metadata import version

from regard import data, draw, errors, measures, models, rationales
from regard.adopting import adopt
from regard.attention import Trace, edits, intervene, trace
from regard.catalog import list_methods
from regard.comparing import compare, compare_planted
from regard.comparison import Comparison
from regard.diagnosis import diagnose
from regard.explaining import explain
from regard.explanation import Explanation, load_explanation
from regard.finding import Finding, load_finding
from regard.judging import Verdict, verdict
from regard.methods.token_mixing import identifiability
from regard.ranking import Patterns, patterns
from regard.subjects import causal, image, module, pooled, seq2seq, text
from regard.training import fit
from regard.trying import list_trials, trial

__version__ = version("regard")
__all__ = [
    "Comparison", "Explanation", "Finding", "Patterns", "Trace", "Verdict", "adopt", "causal", "compare",
    "compare_planted", "data", "diagnose", "draw", "edits", "errors", "explain", "fit", "identifiability", "image",
    "intervene", "list_methods", "list_trials", "load_explanation", "load_finding", "measures", "models", "module",
    "patterns", "pooled", "rationales", "seq2seq", "text", "trace", "trial", "verdict",
]  # fmt: skip
