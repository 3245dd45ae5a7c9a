"""The seam: the only room that touches torch internals."""

from regard.attention.recognise import Ignored
from regard.attention.sites import Site
from regard.attention.tracing import Check, Sites, Trace, measure_readout, trace

__all__ = ["Check", "Ignored", "Site", "Sites", "Trace", "measure_readout", "trace"]
