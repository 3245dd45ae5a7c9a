"""Small models that no light library offers: attention-pooled encoders, TabTransformer, SAINT, and hand-wired toys."""

from regard.models import toys
from regard.models.classifier import AttentionClassifier, conicity
from regard.models.saint import SAINT
from regard.models.tabtransformer import TabTransformer
from regard.models.transducer import Transducer, scratch_transducer

__all__ = ["SAINT", "AttentionClassifier", "TabTransformer", "Transducer", "conicity", "scratch_transducer", "toys"]
