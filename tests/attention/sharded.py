"""What is asked of a small Llama in one process, and, started by torchrun, of the same one spread over several.

    torchrun --nproc-per-node 2 tests/attention/sharded.py FOLDER MODEL…

writes into the folder, for each model and process, the numbers that it gave and the errors that it raised.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, distributed
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

import regard
from regard import edits
from regard.attention import running, sharding

TEXTS = ["the cat sat on the red mat and saw a dog", "a good film", "the big house was so very blue"]
WORDS = ["[UNK]", "[PAD]", "<s>", *sorted({word for text in TEXTS for word in text.split()} | {"bad", "small", "tree"})]
Answers = dict[str, Tensor | str]
Depth = Literal["all", "some", "few"]


def tokenizer() -> PreTrainedTokenizerFast:
    """A word is a token."""
    words = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", bos_token="<s>")


def build(
    path: Path, key_value_heads: int, dtype: torch.dtype = torch.float32, *, family: str = "llama", heads: int = 8,
    bias: bool = False,
) -> Path:  # fmt: skip
    """A decoder of three layers, as a folder."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family, vocab_size=len(WORDS), hidden_size=8 * heads, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=heads, num_key_value_heads=key_value_heads, max_position_embeddings=64, pad_token_id=1,
        bos_token_id=2, eos_token_id=None, initializer_range=0.1, attention_bias=bias,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    if bias:  # transformers starts them at 0, where they would prove nothing
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def answers_of(model: Any, depth: Depth = "all") -> Answers:
    """By name what trace, explain and intervene give; an error is what it says. Some, or few, need less time."""
    subject = regard.causal(model.eval(), tokenizer())
    found: Answers = {}

    def ask(name: str, question: Callable[[], Any]) -> None:
        try:
            answer = question()
        except regard.errors.RegardError as problem:
            answer = f"{type(problem).__name__}: {problem}"
        found[name] = answer.detach().clone().contiguous() if isinstance(answer, Tensor) else answer

    _ask_trace(ask, subject)
    _ask_edits(ask, subject)
    _ask_methods(ask, subject, METHODS if depth == "all" else SOME if depth == "some" else FEW)
    if depth == "some":
        _ask_gradients_of_edits(ask, subject)
    if depth == "all":
        _ask_gradients_of_edits(ask, subject)
        _ask_states(ask, subject)
    return found


def _ask_trace(ask: Any, subject: Any) -> None:
    trace = regard.trace(subject, TEXTS, gradients=True)
    ask("output", lambda: trace.output)
    ask("readout", lambda: trace.check.readout)
    ask("masses", lambda: torch.tensor(trace.check.masses))
    ask("sites", lambda: str([(site.name, site.kind, site.heads, site.shape) for site in trace.sites]))
    ask("looks", trace.looks)
    for number in (0, 2):
        site, name = trace.sites[number], f"site {number} "
        everywhere = site.real.to(site.dtype)
        ask(name + "weights", site.weights)
        ask(name + "some weights", lambda site=site: site.weights(heads=[5, -1, 0], rows=[1, 2]))
        ask(name + "gradients", site.gradients)
        ask(name + "some gradients", lambda site=site: site.gradients(heads=[6, 2], rows=3))
        ask(name + "gates", lambda site=site: site.gate_gradient)
        ask(name + "values", lambda site=site: site.values)
        ask(name + "matrix", site.matrix)
        ask(name + "matrices", lambda site=site: site.matrix(per_head=True))
        ask(name + "entropy", lambda site=site: site.entropy(trace.readout))
        ask(name + "pull", lambda site=site: site.pull(trace.readout))
        ask(name + "pull of heads", lambda site=site, r=everywhere: site.pull(r, per_head=True))
        ask(name + "no head", lambda site=site: site.weights(heads=8))
    ask("frame", lambda: torch.tensor(trace.frame()[["entropy", "special_share"]].to_numpy()))
    before, running.ROWS_KEPT = running.ROWS_KEPT, 8  # blocks are checkpointed, and recomputed in the backward pass
    ask("long", lambda: regard.trace(subject, TEXTS, gradients=True).sites[1].gradients())
    running.ROWS_KEPT = before


METHODS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in regard.list_methods()["name"] if name not in ("shapley", "integrated_gradients")),
    ("shapley", {"samples": 3}), ("integrated_gradients", {"steps": 5}), ("raw", {"heads": "max"}),
    ("raw", {"heads": "min"}), ("raw", {"heads": 6}), ("raw", {"per_head": True, "per_layer": True}),
    ("raw", {"heads": "max", "matrix": True}), ("integrated", {"per_head": True, "steps": 4}),
    ("integrated", {"layers": "mean", "steps": 4}), ("value_zeroing", {"layers": "rollout"}),
    ("attention_gradient", {"layers": "rollout", "absolute": True}), ("attention_gradient", {"matrix": True}),
    ("rollout", {"per_layer": True}), ("grad_rollout", {"matrix": True}), ("token_mixing", {"probes": 3}),
    ("leave_one_out", {"how": "attention"}), ("gradient", {"through_attention": False}), ("norm", {"per_head": True}),
]  # fmt: skip


SOME: list[tuple[str, dict[str, Any]]] = [
    ("rollout", {}), ("grad_rollout", {}), ("attention_gradient", {"matrix": True}), ("raw", {"heads": "max"}),
    ("integrated", {"per_head": True, "steps": 4}), ("value_zeroing", {}), ("gradient", {}), ("effective", {}),
]  # fmt: skip
FEW: list[tuple[str, dict[str, Any]]] = [("effective", {})]


def _ask_methods(ask: Any, subject: Any, methods: list[tuple[str, dict[str, Any]]]) -> None:
    def explained(method: str, options: dict[str, Any]) -> Tensor:
        every = regard.explain(subject, TEXTS, method=method, **options)
        return torch.cat([torch.from_numpy(one.scores).double().flatten() for one in every])

    for method, options in methods:
        ask(f"explain {method} {options}", lambda method=method, options=options: explained(method, options))
    if methods is not METHODS:
        return
    asked = {"methods": ["raw", "grad_rollout", "gradient"], "examples": 3}
    ask("compare", lambda: torch.tensor(regard.compare(subject, TEXTS, **asked).matrix().to_numpy(dtype=float)))
    produced = {"method": "rollout", "generate": 2}
    ask("generate", lambda: torch.from_numpy(regard.explain(subject, TEXTS[0], **produced)[1].scores).clone())


def _ask_edits(ask: Any, subject: Any) -> None:
    drawn = torch.rand(3, 3, 1, 11, generator=torch.Generator().manual_seed(0))
    alone = torch.eye(8)[:, None]  # variant 1 head
    some: dict[str, tuple[Any, int | None]] = {
        "permute": (edits.permute(3), None),
        "permute variants": (edits.permute(3), 6),
        "permute heads": (edits.permute(3, heads=[6, 1]), 6),
        "permute one head": (edits.permute(3, heads=6, sites=1, rows="all"), None),
        "permute shared": (edits.permute(3, shared=True, heads=[1, 6]), 3),
        "uniform": (edits.uniform(), None),
        "uniform heads": (edits.uniform(heads=[2, 7]), None),
        "zero": (edits.zero([0, 1], heads=[0, 4, 5]), None),
        "scale": (edits.scale(torch.linspace(0, 1, 5), heads=[3, 4]), 5),
        "gate": (edits.gate(None, torch.linspace(0, 1, 8)), None),
        "gate heads": (edits.gate([7, 1], torch.tensor([0.3, 0.6])), None),
        "gate each": (edits.gate(None, 1 - alone, sites=1), 8),
        "replace": (edits.replace(drawn, heads=[0, 3, 6], sites=2, allow_unnormalised=True), None),
        "hand on": (edits.hand_on(0.5, where=torch.arange(8) % 3 == 0), None),
        "custom": (edits.custom(lambda weights, place: weights * (1 + place.heads[0]), allow_unnormalised=True, heads=5), None),
        "several": ([edits.uniform(heads=5), edits.gate([5, 0], 0.5), edits.permute(1, heads=[0])], 4),
        "wrong head": (edits.uniform(heads=8), None),
        "wrong shape": (edits.gate(None, torch.ones(4)), None),
    }  # fmt: skip
    for name, (edit, variants) in some.items():
        ask(name, lambda edit=edit, variants=variants: regard.intervene(subject, TEXTS, edit, variants=variants))
    for name in ("permute heads", "several"):  # what lies upstream is run again, too
        edit, variants = some[name]
        options = {"variants": variants, "replay": False}
        ask(f"{name} {options}", lambda edit=edit, options=options: regard.intervene(subject, TEXTS, edit, **options))


def _ask_gradients_of_edits(ask: Any, subject: Any) -> None:
    generator = torch.Generator().manual_seed(0)

    def slope(make: Callable[[Tensor], Any], given: Tensor) -> Tensor:
        leaf = given.clone().requires_grad_()
        output = regard.intervene(subject, TEXTS, make(leaf), gradients=True)
        return torch.autograd.grad(output[:, 5].sum(), leaf)[0]

    unlike = {"sites": 1, "allow_unnormalised": True}
    weights, handed = torch.rand(3, 3, 1, 11, generator=generator), torch.rand(3, 1, 11, 8, generator=generator)
    ask("by gates", lambda: slope(lambda x: edits.gate(None, x, sites=1), torch.linspace(0.2, 1, 8)))
    ask("by gates of two heads", lambda: slope(lambda x: edits.gate([7, 1], x), torch.tensor([0.2, 0.6])))
    ask("by the gate of one head", lambda: slope(lambda x: edits.gate([7], x), torch.tensor([0.2])))
    ask("by a scale", lambda: slope(edits.scale, torch.tensor(0.7)))
    ask("by weights", lambda: slope(lambda x: edits.replace(x, heads=[0, 3, 6], **unlike), weights))
    ask("by weights of one head", lambda: slope(lambda x: edits.replace(x, heads=[6], **unlike), weights[:, :1]))
    ask("by what a head hands on", lambda: slope(lambda x: edits.hand_on(x, sites=1, heads=[2]), handed))


def _ask_states(ask: Any, subject: Any) -> None:
    for at in ("block", "attention", "mlp", "entrance"):
        layer = "rows" if at == "entrance" else 1
        ask(f"state {at}", lambda at=at, layer=layer: regard.trace(subject, TEXTS, states=at).state(layer, at))
        halved = edits.state(lambda state, place: state * 0.5, at=at)
        ask(f"edited {at}", lambda halved=halved: regard.intervene(subject, TEXTS, halved))
    for parameter in subject.model.parameters():
        parameter.requires_grad_(False)
    ask("frozen", lambda: regard.trace(subject, TEXTS, gradients=True).sites[1].gradients())


def asked_of_shards(model: Any, example: Path) -> dict[str, Any]:
    """What has no like in one process: what travels, what is refused, and what goes wrong in one of them."""
    rank, found = distributed.get_rank(), {}
    subject = regard.causal(model.eval(), tokenizer())

    def ask(name: str, question: Callable[[], Any]) -> None:
        try:
            found[name] = question()
        except regard.errors.RegardError as problem:
            found[name] = f"{type(problem).__name__}: {problem}"

    trace = regard.trace(subject, TEXTS, gradients=True)
    site = trace.sites[1]
    ask("held", lambda: [*site.held])
    ask("proof", lambda: trace.check.error < 1e-5)
    ask("pull travels", lambda: sizes_of(lambda: site.pull(trace.readout)))
    ask("gradient pull travels", lambda: sizes_of(lambda: site.pull(
        trace.readout, weigh=lambda tile, part: tile * site.gradient(part, tile.shape[-1]))))  # fmt: skip
    ask("pull of heads travels", lambda: sizes_of(lambda: site.pull(trace.readout, per_head=True)))
    ask("a matrix travels", lambda: sizes_of(site.matrix))
    ask("all at once", lambda: site.pull(trace.readout, weigh=lambda tile, part: tile, together=True))
    largest = lambda tile, part: tile.amax(1, keepdim=True)  # noqa: E731
    ask("largest of several rows", lambda: site.pull(site.real.float(), weigh=largest, together="max"))
    for option in ("onward", "inward"):
        ask(option, lambda option=option: regard.trace(subject, TEXTS, **{option: True}))
    ask("heads", lambda: regard.heads(subject, TEXTS))
    ask("trial", lambda: regard.trial(subject, TEXTS * 3, "permutation"))
    ask("audit", lambda: regard.audit(subject, TEXTS * 3, out=example.parent / "audit"))
    seen: list[tuple[int, ...]] = []
    own = edits.custom(lambda weights, place: (seen.append(place.heads), weights)[1], heads=[6, 1, 2], sites=1)
    regard.intervene(subject, TEXTS, own)
    found["heads of a function"] = [*seen[0]]
    ask("bad weights of one head", lambda: regard.intervene(subject, TEXTS, edits.replace(torch.ones(11), heads=6)))
    wrong = replace(site.sample, out=site.sample.out + (rank == 1))
    ask("not reproduced in one process", lambda: replace(site, sample=wrong).weights())
    weight = model.model.layers[1].self_attn.q_proj.weight
    with torch.no_grad():
        kept = weight.to_local().clone()
        weight.to_local().fill_(float("nan") if rank == 1 else 1.0)
        ask("NaN in one process", lambda: regard.trace(subject, TEXTS))
        weight.to_local().copy_(kept)
    ask("other inputs", lambda: regard.trace(subject, TEXTS[rank]))
    sys.argv[1:] = [str(example), "the cat sat on the mat"]
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "sharded.py"), run_name="__main__")
    sharding.PATIENCE = timedelta(seconds=2)
    if rank == 0:
        start = time.monotonic()
        ask("alone", lambda: regard.trace(subject, TEXTS))
        found["waited"] = time.monotonic() - start
    return found


def sizes_of(question: Callable[[], Any]) -> list[list[int]]:
    """The shapes of what is exchanged."""
    seen, before = [], distributed.all_reduce

    def noted(tensor: Tensor, *args: Any) -> None:
        seen.append(list(tensor.shape))
        before(tensor, *args)

    distributed.all_reduce = noted
    try:
        question()
    finally:
        distributed.all_reduce = before
    return seen


def refused(path: Path) -> str:
    """What is said of a model that cannot be spread over so many processes, before anything runs."""
    model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto")
    try:
        regard.causal(model, tokenizer())
    except regard.errors.NotServed as problem:
        return str(problem)
    return "nothing"


def depth_of(name: str, processes: int = 1) -> Depth:
    """How much a model is asked."""
    if name.startswith(("eager", "brief")):
        return "few"
    return "some" if processes > 2 or name.startswith("double") else "all"


def save(folder: Path, name: str, answers: dict[str, Any]) -> None:
    """Numbers and words, of one process."""
    rank = distributed.get_rank()
    numbers = {key: one for key, one in answers.items() if isinstance(one, Tensor)}
    save_file(numbers, folder / f"{name}.{rank}.safetensors")
    words = {key: one for key, one in answers.items() if key not in numbers}
    (folder / f"{name}.{rank}.json").write_text(json.dumps(words))


def main(folder: Path, paths: list[Path]) -> None:
    """Ask everything of all models."""
    size = int(os.environ["WORLD_SIZE"])
    for path in paths:
        if path.name.startswith("refused"):
            words = refused(path)
            save(folder, path.name, {"refused": words})
            continue
        options = {"attn_implementation": "eager"} if path.name.startswith("eager") else {}
        model = AutoModelForCausalLM.from_pretrained(path, tp_plan="auto", dtype="auto", **options)
        save(folder, path.name, answers_of(model, depth_of(path.name, size)))
    if size == 2:
        model = AutoModelForCausalLM.from_pretrained(paths[0], tp_plan="auto")
        save(folder, "shards", asked_of_shards(model, paths[0]))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(one) for one in sys.argv[2:]])
