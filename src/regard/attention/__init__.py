"""The seam: the only room that touches torch internals."""

from regard.attention import edits
from regard.attention.intervening import Rerun, intervene
from regard.attention.reading import measure_readout
from regard.attention.recognise import Ignored
from regard.attention.sites import Part, Site
from regard.attention.tracing import Check, Sites, Trace, trace

__all__ = [
    "Check", "Ignored", "Part", "Rerun", "Site", "Sites", "Trace", "edits", "intervene", "measure_readout", "trace",
]  # fmt: skip
