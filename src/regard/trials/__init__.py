"""One file for each trial: file name = function name = name on the command line.

A trial takes a `Case` and options, and returns a `Finding`. Its file declares

    CLAIM      a sentence that can be false
    REFERENCE  what chance, a random explanation or a ceiling looks like
    CITE       a key of references.bib
    CRITERION  the row of the verdict that it fills: "consistent", "exclusive", "causal", …; "": a row of its own
    NEEDS      "explanation" if it judges one; of the data "labels", "rationales"; of the model "classes"; "recipe" if
               it trains more models: then `case.lab` is where, and it is not cut into batches

Nothing needs to be registered. A trial is tested twice: where it must support its claim and where it must not.
"""
