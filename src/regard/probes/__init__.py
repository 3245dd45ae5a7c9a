"""One file for each probe: file name = function name = name on the command line.

A probe gives a number for each head of each site, or says something of a model's heads and layers as a whole. Its file
declares

    EACH   what the function is called with, and returns:
           "row"   a `Glimpse`, some rows of one site: ``(example, head, row)``, or with PARTS ``(…, row, part)``
           "head"  a `Trace` and one of its sites: ``(example, head)``
           "case"  a `Survey`, a case with all its examples: a `Probed`
    ABOUT  what the number is, in a few words; of "case" what it finds out
    NEEDS  "weights", "gradients", "reruns", "projections", "states"; of the data "labels", "words" (CoNLL-U),
           "mentions" (GAP), "facts"; of the model "tokens": a vocabulary and a text that goes on
    CITE   a key of references.bib

Those of rows and heads are averaged over rows, then over examples, in one pass of traces for all of them, with
intervals over examples. NaN is left out: what a row, or a site, does not define. Such a file may have

    PARTS                   names of the last axis
    settle(means, layer)    ``(draw, part, head)`` and ``(head,)``: the number of each head ``(draw, head)``, and a word
                            for each, such as "previous"; the first draw is what was seen

Any file may define ``cannot(subject, trace)``: why a model cannot serve it, or None. Nothing needs to be registered.
"""
