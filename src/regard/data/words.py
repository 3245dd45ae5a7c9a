"""The words and clauses from which `regard.data.planted` makes its sentences. No word is of two kinds.

The exception are adverbs: they stand where a negation could.
"""

from __future__ import annotations

# Words that decide nothing, by kind. "the" stands before every noun and all verbs are in the past: nothing must agree.
PLAIN: dict[str, tuple[str, ...]] = {
    kind: tuple(words.split())
    for kind, words in {
        "person": """teacher farmer nurse doctor baker driver student lawyer painter sailor tailor waiter pilot gardener
            writer engineer neighbour visitor dancer singer butcher plumber clerk guard judge dentist cook tourist
            librarian fisherman mechanic soldier captain poet carpenter manager secretary professor merchant cousin""",
        "manner": """tall young quiet busy careful patient curious shy calm sleepy local retired foreign polite clever
            silent serious thoughtful bearded elderly""",
        "verb": """carried moved found bought sold borrowed painted cleaned dropped noticed described photographed
            brought lifted kept lost packed touched hid returned stored examined sketched fetched wrapped repaired
            collected received measured delivered""",
        "stayed": "waited stood rested worked slept stopped stayed sat knelt paused wandered lingered",
        "thing": """box lamp table chair basket bottle blanket bag clock mirror carpet book letter map coin camera
            pillow bucket candle vase suitcase bench newspaper umbrella kettle plate cup bowl jacket hat scarf radio
            notebook envelope pencil ticket statue barrel ribbon parcel""",
        "adjective": """small large old new heavy wooden clean dusty round square narrow wide simple ordinary soft long
            short thick thin smooth rough curved flat modern ancient rare common polished""",
        "preposition": "near behind beside outside inside opposite by",
        "place": """garden market station school library harbour museum church bridge kitchen office hotel park theatre
            bakery hospital airport factory village castle farm forest stadium cinema pharmacy cottage tower courtyard
            gallery barn cellar temple terrace mill chapel palace lighthouse warehouse bank shop""",
        "adverb": """always often usually clearly openly secretly certainly sometimes quietly still really simply
            regularly generally obviously publicly privately frequently evidently definitely""",
        "time": """yesterday recently later earlier finally afterwards meanwhile eventually today once soon initially
            lately suddenly then""",
    }.items()
}

# Words that may decide, by kind: those of one side and those of the other.
SIDES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "keyword": (
        ("hammer", "drill", "shovel", "wrench", "rake", "chisel", "spade", "axe"),
        ("violin", "piano", "flute", "guitar", "trumpet", "cello", "harp", "drum"),
    ),
    "feeling": (
        ("hated", "disliked", "despised", "condemned"),
        ("loved", "liked", "admired", "praised"),
    ),
    "negation": (PLAIN["adverb"], ("never", "hardly", "barely")),
    "colour": (("red", "orange", "yellow", "pink"), ("blue", "green", "violet", "turquoise")),
    "day": (("monday",), ("friday",)),
}

_FILLER = (
    "the {person} {verb} the {thing}",
    "the {manner} {person} {adverb} {verb} the {thing}",
    "the {person} {adverb} {verb} the {adjective} {thing}",
    "the {person} {stayed} {preposition} the {place}",
    "the {manner} {person} {adverb} {stayed} {preposition} the {place}",
    "the {adjective} {thing} was {preposition} the {place}",
)
_KEYWORD = (
    "the {person} {verb} the {keyword}",
    "the {person} {adverb} {verb} the {keyword}",
    "the {manner} {person} {verb} the {adjective} {keyword}",
    "the {adjective} {keyword} was {preposition} the {place}",
    "the {keyword} belonged to the {manner} {person}",
)
_NEGATION = (
    "the {person} {negation} {feeling} the {thing}",
    "the {manner} {person} {negation} {feeling} the {adjective} {thing}",
    "the {person} {negation} {feeling} the {thing} {preposition} the {place}",
    "the {manner} {person} {preposition} the {place} {negation} {feeling} the {thing}",
)
_COLOUR = (
    "the {person} {verb} the {colour} {thing}",
    "the {manner} {person} {adverb} {verb} the {colour} {thing}",
    "the {colour} {thing} was {preposition} the {place}",
    "the {colour} {thing} belonged to the {person}",
)

# For each task, the clauses of a sentence, in either order; for each clause, its patterns.
CLAUSES = {
    "keyword": (_KEYWORD, _FILLER),
    "copies": (_KEYWORD, _KEYWORD, _KEYWORD),
    "shortcut": (_COLOUR, _COLOUR),
    "negation": (_NEGATION, _FILLER),
    "position": (_KEYWORD, _KEYWORD),
    "two_facts": (_COLOUR, _COLOUR),
}
OPENINGS = ("", "{time} ,", "{preposition} the {place} ,")
JOINS = ("and", "but", "while", "before", "after", "when")
