"""One file for each method: file name = function name = name on the command line.

A method takes a `Trace` and options, and returns `Scores`. Its file declares

    FAMILY   "attention", "reference" or "control"
    NEEDS    of the trace: "weights", "values" (and what they are projected to), "gradients", "reruns" of the model
    CITE     a key of references.bib
    FORMULA  in one line
    PASSES   what it costs, in forward and backward passes
    OF       the scalar its paper explains: "logit", "probability" or "logprob"

and may define ``cannot(trace)``: why a model cannot serve it, or None. Nothing needs to be registered.
"""
