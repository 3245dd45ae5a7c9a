"""Each token that a language model goes on with, explained over all that came before it.

The oracle is the prefix on its own: the same ids, cut before the token, which is the target. Models are small, random
and in float64; scores agree to 1e-6 of the largest.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import SMALL, assert_close, attend, bert, gpt2, ids_of, llama, seeded, t5

import regard
from regard import catalog, errors
from regard.types import Batch, Features, Source

PROMPT, GOES_ON = "a moving film", "and never ends"
METHODS = sorted(catalog.found())


@pytest.fixture(scope="module", params=[gpt2, llama], ids=["GPT-2", "Llama"])
def subject(request, tokenizer):
    return regard.causal(request.param(tokenizer), tokenizer)


def ids_after(tokenizer, prompt, more):
    """Of the prompt, and of what comes after it."""
    return tokenizer(prompt)["input_ids"], tokenizer(more, add_special_tokens=False)["input_ids"]


def greedy(model, tokenizer, prompt, count, **options):
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    return model.generate(**inputs, max_new_tokens=count, do_sample=False, num_beams=1, **options)[0].tolist()


def alone(subject, ids, token, **options):
    """The explanation of what comes after exactly these ids."""
    ids = torch.tensor([ids])
    mask = torch.ones_like(ids)
    names = [subject.tokenizer.decode([one]) for one in ids[0].tolist()]
    odd = [one in subject.tokenizer.all_special_ids for one in ids[0].tolist()]
    count = iter(range(len(names)))
    word = tuple(None if special else next(count) for special in odd)
    words = tuple(name for name, special in zip(names, odd, strict=True) if not special)
    features = Features(tuple(names), tuple(range(len(names))), words, word)
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": torch.arange(len(names))[None]}
    (why,) = regard.explain(subject, Batch(inputs, mask.bool(), (features,)), target=token, **options)
    return why


# --- each is the explanation of its prefix --------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_token_is_explained_as_after_its_prefix_alone(subject, method):
    """Whether one pass serves all tokens, or each is differentiated or run again on its own."""
    prompt, more = ids_after(subject.tokenizer, PROMPT, GOES_ON)
    found = regard.explain(subject, PROMPT, method=method, continuation=GOES_ON)
    assert len(found) == len(more) == 3
    for place, (why, token) in enumerate(zip(found, more, strict=True)):
        prefix = prompt + more[:place]
        expected = alone(subject, prefix, token, method=method)
        assert why.features.tokens == expected.features.tokens
        assert_close(why.scores, expected.scores)
        assert why.value == pytest.approx(expected.value, rel=1e-6)
        assert why.target == subject.tokenizer.decode([token])
        for name, fact in expected.facts.items():
            np.testing.assert_allclose(why.facts[name], fact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("rollout", {"matrix": True}), ("grad_rollout", {"matrix": True}), ("integrated", {"matrix": True, "steps": 2}),
        ("norm", {"layers": "rollout"}), ("first_layer", {"reduce": "column"}), ("raw", {"per_head": True}),
    ],
)  # fmt: skip
def test_so_are_matrices_and_sums_over_rows(subject, method, options):
    """Rows that come after the token are not there for it, neither as keys nor as queries."""
    prompt, more = ids_after(subject.tokenizer, PROMPT, GOES_ON)
    found = regard.explain(subject, PROMPT, method=method, continuation=GOES_ON, **options)
    for place in range(len(more)):
        expected = alone(subject, prompt + more[:place], more[place], method=method, **options)
        assert found[place].axes == expected.axes
        assert found[place].queries == expected.queries
        assert_close(found[place].scores, expected.scores)


def test_rollout_and_grad_rollout_written_out(subject):
    """The same prefixes once more, by the model's own eager attention and its gradients."""
    prompt, more = ids_after(subject.tokenizer, PROMPT, GOES_ON)
    rollout, gradients = (
        regard.explain(subject, PROMPT, method=method, continuation=GOES_ON) for method in ("rollout", "grad_rollout")
    )
    for place, token in enumerate(more):
        inputs = {"input_ids": torch.tensor([prompt + more[:place]])}
        run = attend(subject.model, inputs, lambda output, token=token: output.logits[0, -1, token])
        identity = torch.eye(len(prompt) + place, dtype=torch.float64)
        plain, weighed = identity, identity
        for weights, product in zip(run.weights, run.products, strict=True):
            plain = (identity + weights.mean(0)) / 2 @ plain
            weighed = weighed + product.clamp_min(0).mean(0) @ weighed
        assert_close(rollout[place].scores, plain[-1])
        assert_close(gradients[place].scores, weighed[-1])


# --- what is said ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["rollout", "grad_rollout", "integrated"])
def test_generated_tokens_are_the_models_own_and_so_are_their_probabilities(subject, method):
    tokenizer = subject.tokenizer
    ids = greedy(subject.model, tokenizer, PROMPT, 5)
    prompt = tokenizer(PROMPT)["input_ids"]
    assert len(set(ids[len(prompt) :])) > 2, "one token repeated could not tell rows apart"
    found = regard.explain(subject, PROMPT, method=method, generate=5)
    assert [why.target for why in found] == [tokenizer.decode([token]) for token in ids[len(prompt) :]]
    with torch.no_grad():
        logits = subject.model(input_ids=torch.tensor([ids])).logits[0]
    for place, why in enumerate(found):
        row, token = len(prompt) + place - 1, ids[len(prompt) + place]
        probabilities = logits[row].softmax(-1)
        assert int(probabilities.argmax()) == token
        assert why.probability == pytest.approx(float(probabilities[token]), rel=1e-6)
        assert why.value == pytest.approx(float(probabilities[token] if method == "integrated" else logits[row, token]))
        assert why.features.tokens == tuple(tokenizer.decode([one]) for one in ids[: row + 1])
        assert why.scores.shape == (row + 1,)
        assert why.check["readout"] == "measured"


def test_a_continuation_that_was_generated_is_explained_as_when_it_is_generated(subject, tokenizer):
    ids = greedy(subject.model, tokenizer, PROMPT, 3)
    generated = regard.explain(subject, PROMPT, method="rollout", generate=3)
    prompt = tokenizer(PROMPT)["input_ids"]
    for place, why in enumerate(generated):
        token = ids[len(prompt) + place]
        assert_close(why.scores, alone(subject, ids[: len(prompt) + place], token, method="rollout").scores)


def test_generation_ends_where_the_model_ends_it(tokenizer):
    model = gpt2(tokenizer)
    free = greedy(model, tokenizer, PROMPT, 8)[len(tokenizer(PROMPT)["input_ids"]) :]
    last = next(place for place in range(1, 8) if free[place] not in free[:place])
    model.generation_config.eos_token_id = free[last]
    found = regard.explain(regard.causal(model, tokenizer), PROMPT, method="raw", generate=8)
    assert len(found) == last + 1
    assert found[-1].target == tokenizer.decode([free[last]])


def test_a_continuation_may_be_cut(subject):
    whole = regard.explain(subject, PROMPT, method="rollout", continuation=GOES_ON)
    some = regard.explain(subject, PROMPT, method="rollout", continuation=GOES_ON, generate=3)
    assert [why.target for why in some] == [why.target for why in whole[:3]]
    for one, other in zip(some, whole, strict=False):
        assert_close(one.scores, other.scores)


def test_other_scalars(subject):
    for of, like in (("logprob", np.log), ("probability", lambda x: x)):
        for why in regard.explain(subject, PROMPT, method="grad_rollout", continuation=GOES_ON, of=of):
            assert why.of == of
            assert why.value == pytest.approx(float(like(why.probability)), rel=1e-6)


# --- words ----------------------------------------------------------------------------------------------------------


def test_words_that_are_cut_are_named_by_what_was_there(subject):
    tokenizer = subject.tokenizer
    pieces = tokenizer("unbelievably", add_special_tokens=False)["input_ids"]
    assert len(pieces) > 2
    found = regard.explain(subject, PROMPT, method="rollout", continuation="it unbelievably ends")
    for place in range(len(pieces)):
        expected = ["a", "moving", "film", "it"] + ([tokenizer.decode(pieces[:place])] if place else [])
        assert list(found[place + 1].features.words) == expected
        words = found[place + 1].words()
        assert list(words.loc[~words["special"].astype(bool), "word"]) == expected
        assert words["score"].sum() == pytest.approx(found[place + 1].scores.sum())


def test_a_real_decoder(smollm):
    """SmolLM2: its own greedy text, probabilities and words."""
    prompt = "The capital of France is"
    ids = greedy(smollm.model, smollm.tokenizer, prompt, 6, pad_token_id=smollm.tokenizer.eos_token_id)
    before = len(smollm.tokenizer(prompt)["input_ids"])
    found = regard.explain(smollm, prompt, method="rollout", generate=6)
    assert [why.target for why in found] == [smollm.tokenizer.decode([token]) for token in ids[before:]]
    assert found[0].target == " Paris"
    with torch.no_grad():
        logits = smollm.model(input_ids=torch.tensor([ids])).logits[0]
    for place, why in enumerate(found):
        chance = float(logits[before + place - 1].softmax(-1)[ids[before + place]])
        assert why.probability == pytest.approx(chance, rel=1e-3)
        assert list(why.features.words) == smollm.tokenizer.decode(ids[: before + place]).split()
        assert why.scores.sum() == pytest.approx(1, abs=1e-4)
    cut = regard.explain(smollm, prompt, method="rollout", continuation=" unbelievably")
    assert len(cut) > 1
    pieces = smollm.tokenizer(" unbelievably", add_special_tokens=False)["input_ids"]
    for place in range(1, len(cut)):
        assert cut[place].features.words[-1] == smollm.tokenizer.decode(pieces[:place]).strip()


# --- encoder–decoders -----------------------------------------------------------------------------------------------

SOURCE = "a moving film that is long and dull, and never ends"
STACKS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "init_std": 0.3, "max_position_embeddings": 40,
    "forced_eos_token_id": None,
}  # fmt: skip


def bart(tokenizer):
    start = {"decoder_start_token_id": tokenizer.cls_token_id, "tie_word_embeddings": False}
    return seeded(lambda: hf.BartForConditionalGeneration(hf.BartConfig(**ids_of(tokenizer), **start, **STACKS)))


@pytest.fixture(scope="module", params=[t5, bart], ids=["T5", "BART"])
def translator(request, tokenizer):
    return regard.seq2seq(request.param(tokenizer), tokenizer)


def cut_after(subject, ids, said, **options):
    """The explanation of the last of the tokens that were said, with nothing after it."""
    ids, taken = torch.tensor([ids]), torch.tensor([[subject.model.config.decoder_start_token_id, *said[:-1]]])
    features = [
        Features(tuple(names), tuple(range(len(names))), tuple(names), tuple(range(len(names))))
        for names in ([subject.tokenizer.decode([one]) for one in part[0].tolist()] for part in (ids, taken))
    ]
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "decoder_input_ids": taken,
        "decoder_attention_mask": torch.ones_like(taken),
    }  # fmt: skip
    source = Source(torch.ones_like(ids).bool(), (features[0],))
    batch = Batch(inputs, torch.ones_like(taken).bool(), (features[1],), source=source, said=(said[-1],))
    (why,) = regard.explain(subject, batch, **options)
    return why


@pytest.mark.parametrize(
    ("method", "options"),
    [("raw", {}), ("rollout", {}), ("grad_rollout", {}), ("integrated", {"of": "logit", "steps": 3})],
)
def test_produced_tokens_are_explained_as_after_their_prefix_alone(translator, method, options):
    tokenizer = translator.tokenizer
    said = tokenizer("so it ends")["input_ids"]  # with the mark of the end
    source = tokenizer(SOURCE)["input_ids"]
    found = regard.explain(translator, SOURCE, method=method, continuation="so it ends", **options)
    assert [why.target for why in found] == [tokenizer.decode([token]) for token in said]
    for place, why in enumerate(found):
        expected = cut_after(translator, source, said[: place + 1], method=method, **options)
        assert why.parts == expected.parts
        assert why.features.tokens == expected.features.tokens
        assert_close(why.scores, expected.scores)
        assert why.probability == pytest.approx(expected.probability, rel=1e-6)


def test_a_translation_is_the_models_own(translator):
    tokenizer, model = translator.tokenizer, translator.model
    said = greedy(model, tokenizer, SOURCE, 4)[1:]
    found = regard.explain(translator, SOURCE, method="rollout", generate=4)
    assert [why.target for why in found] == [tokenizer.decode([token]) for token in said]
    inputs = tokenizer(SOURCE, return_tensors="pt", return_token_type_ids=False)
    inputs["decoder_input_ids"] = torch.tensor([[model.config.decoder_start_token_id, *said[:-1]]])
    with torch.no_grad():
        chances = model(**inputs).logits[0].softmax(-1)
    for place, why in enumerate(found):
        assert why.probability == pytest.approx(float(chances[place, said[place]]), rel=1e-6)
        assert why.parts == {"source": inputs["input_ids"].shape[1], "produced": place + 1}


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "options", "error", "said"),
    [
        (PROMPT, {"generate": 0}, errors.OptionError, "generate=0: at least one token"),
        (PROMPT, {"generate": -2}, errors.OptionError, "generate=-2: at least one token"),
        (PROMPT, {"generate": 2.5}, errors.OptionError, "generate=2.5"),
        (PROMPT, {"continuation": ""}, errors.EmptyInput, "continuation=''.*no token to explain"),
        (PROMPT, {"continuation": "it ends", "generate": 0}, errors.InputError, "generate=0"),
        (PROMPT, {"continuation": "it ends", "generate": -1}, errors.InputError, "generate=-1"),
        (
            PROMPT,
            {"generate": 2, "target": "film"},
            errors.WrongTarget,
            "target='film': each token of the continuation",
        ),
        (PROMPT, {"continuation": "so", "target": 3}, errors.WrongTarget, "Leave target out"),
        ([PROMPT, "so"], {"generate": 2}, errors.InputError, "inputs has 2 prompts: pass one at a time"),
        ("", {"generate": 2}, errors.EmptyInput, "is empty"),
        (PROMPT, {"continuation": "so " * 70}, errors.TooLong, "prompt and continuation have 74 tokens.*takes 64"),
    ],
)
def test_what_a_decoder_refuses(subject, inputs, options, error, said):
    with pytest.raises(error, match=said):
        regard.explain(subject, inputs, method="rollout", **options)


@pytest.mark.parametrize(
    ("inputs", "options", "error", "said"),
    [
        (SOURCE, {"generate": 0}, errors.OptionError, "generate=0: at least one token"),
        (SOURCE, {"continuation": ""}, errors.EmptyInput, "is empty|no token to explain"),
        (SOURCE, {"generate": 2, "target": "film"}, errors.WrongTarget, "Leave target out"),
        ([SOURCE, "so"], {"generate": 2}, errors.InputError, "pass one text"),
        ((SOURCE, "so it is"), {"generate": 2}, errors.InputError, "pass one text"),
    ],
)
def test_what_an_encoder_decoder_refuses(translator, inputs, options, error, said):
    with pytest.raises(error, match=said):
        regard.explain(translator, inputs, method="rollout", **options)


@pytest.mark.parametrize("options", [{"generate": 2}, {"continuation": "so"}])
def test_a_verbalizer_or_a_subject_that_writes_nothing_is_refused(subject, tokenizer, options):
    voiced = replace(subject, verbalizer={"good": "good", "bad": "bad"})
    with pytest.raises(errors.WrongTarget, match="with a verbalizer the output is a distribution over its classes"):
        regard.explain(voiced, PROMPT, method="rollout", **options)
    with pytest.raises(errors.NotServed, match="this subject writes no text. Use regard.causal or regard.seq2seq"):
        regard.explain(regard.text(bert(tokenizer), tokenizer), PROMPT, method="rollout", **options)
    with pytest.raises(errors.NotServed, match="this subject writes no text"):
        regard.explain(regard.pooled(regard.models.toys.decisive()), "so good", method="rollout", **options)


def test_positions_of_a_longer_model(tokenizer):
    """As long as the model has positions: the last token of all needs none."""
    model = seeded(
        lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**ids_of(tokenizer), **SMALL | {"max_position_embeddings": 8}))
    )
    subject = regard.causal(model, tokenizer)
    assert len(tokenizer(PROMPT)["input_ids"]) == 5
    assert len(regard.explain(subject, PROMPT, method="rollout", continuation="so so so so")) == 4
    with pytest.raises(errors.TooLong, match="9 tokens, but the model takes 8"):
        regard.explain(subject, PROMPT, method="rollout", continuation="so so so so so")
