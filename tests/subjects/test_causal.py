"""Decoder language models: next-token targets, verbalizers, padding."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import errors

PROMPT = "The capital of France is"


def test_next_token_targets(smollm):
    t = regard.trace(smollm, PROMPT)
    assert t.score.names == (" Paris",)
    paris, rome = (smollm.tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in (" Paris", " Rome"))
    logits = t.output[0]
    for of, column in {"logit": logits, "probability": logits.softmax(-1), "logprob": logits.log_softmax(-1)}.items():
        score = regard.trace(smollm, PROMPT, target=" Paris", of=of).score
        torch.testing.assert_close(score.values[0], column[paris])
    pair = regard.trace(smollm, PROMPT, target=(" Paris", " Rome"), of="logprob").score
    torch.testing.assert_close(pair.values[0], logits[paris] - logits[rome], atol=1e-4, rtol=0)
    assert pair.names == (" Paris rather than  Rome",)
    assert t.readout.tolist() == [[0, 0, 0, 0, 1]]


def test_a_target_of_several_tokens_is_refused(smollm):
    with pytest.raises(errors.WrongTarget, match=r"is \d tokens.*space"):
        regard.trace(smollm, PROMPT, target="Constantinople")


def test_a_verbalizer_makes_a_classifier(smollm):
    subject = regard.causal(smollm.model, smollm.tokenizer, verbalizer={"positive": " good", "negative": " bad"})
    t = regard.trace(subject, "A superb film. In one word, the film is", of="probability")
    assert t.output.shape == (1, 2)
    assert t.score.names[0] in ("positive", "negative")
    torch.testing.assert_close(t.score.values, t.output.softmax(-1).amax(-1))
    with pytest.raises(errors.WrongTarget, match="two classes"):
        regard.causal(smollm.model, smollm.tokenizer, verbalizer={"positive": " good"})
    with pytest.raises(errors.WrongTarget, match="tokens"):
        regard.causal(smollm.model, smollm.tokenizer, verbalizer={"a": " good", "b": "incontrovertibly"})


def test_gradients_of_a_real_decoder_agree_with_finite_differences(smollm):
    """∂y/∂A at the readout row of one site, against moving a weight of the eager model by hand."""
    t = regard.trace(smollm, PROMPT, target=" Paris", gradients=True)
    site = t.sites[20]
    gradient = site.gradients(rows=-1)[0, :, 0]  # head key
    head, key = divmod(int(gradient.abs().argmax()), gradient.shape[1])
    step = 1e-2
    token = smollm.tokenizer(" Paris", add_special_tokens=False)["input_ids"][0]

    def nudged(size):
        def hook(module, args):
            (out,) = args  # (example, row, head · channel), before the output projection
            out = out.clone()
            width = site.values.shape[-1]
            out[0, -1, head * width : (head + 1) * width] += size * site.values[0, head, key]
            return (out,)

        handle = smollm.model.model.layers[20].self_attn.o_proj.register_forward_pre_hook(hook)
        try:
            with torch.no_grad():
                return smollm.forward(smollm.encode(PROMPT))[0, token]
        finally:
            handle.remove()

    numeric = (nudged(step) - nudged(-step)) / (2 * step)
    torch.testing.assert_close(gradient[head, key], numeric, rtol=2e-2, atol=1e-3)


def test_a_classifier_is_sent_to_text(classifier, tokenizer):
    with pytest.raises(errors.SubjectError, match=r"regard\.text"):
        regard.trace(regard.causal(classifier, tokenizer), "a film")


def test_pairs_are_refused(smollm):
    with pytest.raises(errors.InputError, match="is not a text"):
        regard.trace(smollm, [("a", "b")])


def test_a_tokenizer_without_padding_token_is_left_so(smollm):
    tokenizer = smollm.tokenizer
    before = tokenizer.pad_token
    tokenizer.pad_token = None
    try:
        t = regard.trace(regard.causal(smollm.model, tokenizer), ["The capital of France is", "One two"])
        assert tokenizer.pad_token is None
    finally:
        tokenizer.pad_token = before
    assert t.real.sum(-1).tolist() == [5, 2]
