"""Encoder–decoders: what was produced, which token is explained, both sequences, and what is refused."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf

import regard
from regard import errors

TEXTS = ["a moving film", "dull, and it never ends: unbelievably long", "so so"]
PAIRS = [("a moving film", "ein bewegender Film"), ("dull", "it never ends, never")]
STACKS = {
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 40, "decoder_ffn_dim": 40, "init_std": 0.3, "max_position_embeddings": 40,
    "forced_eos_token_id": None,
}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2, "num_heads": 4, "relative_attention_num_buckets": 8}


def build(name, tokenizer):
    """A small untrained model that does not repeat itself at once, and whose texts end after different lengths."""
    torch.manual_seed(0)
    ids = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.sep_token_id,
           "bos_token_id": tokenizer.cls_token_id, "decoder_start_token_id": tokenizer.cls_token_id,
           "tie_word_embeddings": False}  # fmt: skip
    if name == "T5":
        model = hf.T5ForConditionalGeneration(hf.T5Config(**ids, **T5, initializer_factor=2.0))
    elif name == "BART":
        model = hf.BartForConditionalGeneration(hf.BartConfig(**ids, **STACKS))
    else:
        model = hf.MarianMTModel(hf.MarianConfig(**ids, **STACKS))
    said = greedy(model.eval(), tokenizer, TEXTS[0])
    model.generation_config.eos_token_id = [tokenizer.sep_token_id, max(said, key=said.index)]
    return model


def greedy(model, tokenizer, text):
    """Twelve tokens at most, by the model's own generate."""
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    return model.generate(**inputs, max_new_tokens=12, num_beams=1, do_sample=False)[0, 1:].tolist()


@pytest.fixture(params=["T5", "BART", "Marian"])
def model(request, tokenizer):
    return build(request.param, tokenizer)


@pytest.fixture
def subject(model, tokenizer):
    return regard.seq2seq(model, tokenizer, most=12)


@pytest.fixture
def bart(tokenizer):
    return build("BART", tokenizer)


def ids_of(subject, inputs):
    _, _, said = subject._read(inputs)
    return said


def test_generated_tokens_are_the_greedy_choice_of_their_row(subject, tokenizer):
    said = ids_of(subject, TEXTS)
    assert len({len(tokens) for tokens in said}) > 1
    assert len(set(said[0])) > 2, "a text of one token repeated could not tell rows apart"
    for example, text in enumerate(TEXTS):
        expected = greedy(subject.model, tokenizer, text)
        assert said[example] == expected
        for k, token in enumerate(expected):
            t = regard.trace(subject.at(k), text)
            assert int(t.output.argmax()) == token
            assert t.score.index == (token,)
            assert t.readout.nonzero().tolist() == [[0, k]]
            assert t.check.readout == "measured"
    names = tuple(tuple(tokenizer.decode([token]) for token in tokens) for tokens in said)
    assert subject.produced(TEXTS) == names


def test_generation_ends_where_the_model_ends_it(bart, tokenizer):
    bart.generation_config.eos_token_id = None
    (free,) = ids_of(regard.seq2seq(bart, tokenizer, most=12), "a moving film")
    assert len(free) == 12
    bart.generation_config.eos_token_id = free[5]
    ended, longer = ids_of(regard.seq2seq(bart, tokenizer, most=12), ["a moving film", "dull"])
    assert ended == free[: free.index(free[5]) + 1]
    assert len(ended) < len(longer)
    assert len(ids_of(regard.seq2seq(bart, tokenizer, most=1), "a moving film")[0]) == 1
    assert len(ids_of(regard.seq2seq(bart, tokenizer, most=500), "dull")[0]) == 40  # as many as it has positions


def test_settings_of_generation_are_kept_and_do_not_mislead_the_target(bart, tokenizer):
    """Settings may forbid the most probable token; what is explained is what was said."""
    bart.generation_config.eos_token_id = 102
    (free,) = ids_of(regard.seq2seq(bart, tokenizer, most=4), "a moving film")
    bart.generation_config.update(
        num_beams=3, early_stopping=True, do_sample=True, temperature=3.0, max_length=9, forced_eos_token_id=102,
        suppress_tokens=[free[0]],
    )  # fmt: skip
    before = bart.generation_config.to_dict()
    subject = regard.seq2seq(bart, tokenizer, most=4).at(0)
    (said,) = ids_of(subject, "a moving film")
    assert len(said) == 4
    assert said[0] != free[0]
    assert said[-1] != 102
    t = regard.trace(subject, "a moving film")
    assert int(t.output.argmax()) == free[0]
    assert t.score.index == (said[0],)
    assert t.score.names == subject.produced("a moving film")[0][:1]
    assert bart.generation_config.to_dict() == before


def test_sites_of_three_kinds_hold_what_eager_attention_says(subject):
    t = regard.trace(subject, PAIRS)
    eager = copy.deepcopy(subject.model)
    eager.set_attn_implementation("eager")
    inputs = subject.encode(PAIRS).inputs
    with torch.no_grad():
        said = eager(**inputs, output_attentions=True, use_cache=False)
    kinds = {"encoder": said.encoder_attentions, "decoder": said.decoder_attentions, "cross": said.cross_attentions}
    assert [site.kind for site in t.sites] == ["encoder"] * 2 + ["decoder", "cross"] * 2
    for kind, expected in kinds.items():
        found = [site for site in t.sites if site.kind == kind]
        for site, weights in zip(found, expected, strict=True):
            real = site.real[:, None, :, None]
            torch.testing.assert_close(site.weights(), weights.where(real, 0), atol=1e-5, rtol=0)
            assert float(weights.std()) > 0.01
    assert t.check.error < 1e-5


def test_both_sequences_have_features(bart, tokenizer):
    subject = regard.seq2seq(bart, tokenizer)
    t = regard.trace(subject, ("unbelievably dull", "the unbelievably long end"))
    assert t.source.features[0].words == ("unbelievably", "dull")
    assert t.source.features[0].tokens[0] == "[CLS]"
    (features,) = t.features
    produced = subject.produced(("unbelievably dull", "the unbelievably long end"))[0]
    assert produced == ("[CLS]", "the", "un", "##bel", "##ie", "##va", "##bly", "long", "end", "[SEP]")
    assert features.tokens == ("[CLS]", *produced[:-1])  # each row takes the token before the one it predicts
    assert features.words == ("the", "unbelievably", "long", "end")
    assert features.word == (None, None, 0, 1, 1, 1, 1, 1, 2, 3)
    assert t.special_keys(t.sites[-1]).sum() == 2  # the source's
    assert t.special_keys(t.sites[-2]).sum() == 2  # the start token and [CLS]


def test_words_of_byte_level_tokens(smollm):
    tokenizer = smollm.tokenizer
    ids = {"vocab_size": len(tokenizer), "pad_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 1}
    subject = regard.seq2seq(hf.BartForConditionalGeneration(hf.BartConfig(**ids, **STACKS)), tokenizer)
    text = "Two  schöne 🜁🜂 Häuser, and"
    taken = [1, *tokenizer(text)["input_ids"]]
    features = subject._features(taken)
    assert features.words == tuple(text.split())
    by_word = [[token for token, word in zip(taken, features.word, strict=True) if word == index] for index in range(5)]
    assert [tokenizer.decode(tokens).strip() for tokens in by_word] == text.split()
    assert features.word[0] is None


def test_forced_texts(subject, tokenizer):
    said = ids_of(subject, PAIRS)
    assert said == tokenizer([produced for _, produced in PAIRS])["input_ids"]
    batch = subject.encode(PAIRS)
    assert batch.inputs["decoder_input_ids"][0, : len(said[0])].tolist() == [tokenizer.cls_token_id, *said[0][:-1]]
    assert batch.real.sum(-1).tolist() == [len(tokens) for tokens in said]
    t = regard.trace(subject.at(2), PAIRS, of="logprob")
    assert t.score.index == tuple(tokens[2] for tokens in said)
    assert t.score.index != tuple(t.output.argmax(-1).tolist())
    logprobs = t.output.log_softmax(-1)
    torch.testing.assert_close(t.score.values, torch.stack([logprobs[i, said[i][2]] for i in range(2)]))
    # made to say what it says anyway, it does the same
    (free,) = ids_of(subject, "a moving film")
    one, other = subject.encode("a moving film"), subject._batch(*subject._read([PAIRS[0]])[:2], [free])
    assert torch.equal(subject.forward(one), subject.forward(other))


def test_targets(subject, tokenizer):
    subject = subject.at(1)
    t = regard.trace(subject, PAIRS)
    film = tokenizer.convert_tokens_to_ids("film")
    for target in ("film", film):
        score = regard.trace(subject, PAIRS, target=target).score
        torch.testing.assert_close(score.values, t.output[:, film])
        assert score.names == ("film", "film")
    pair = regard.trace(subject, PAIRS, target=("film", "long")).score
    assert pair.names[0] == "film rather than long"
    mixed = regard.trace(subject, PAIRS, target=[None, "film"]).score
    assert mixed.index == (t.score.index[0], film)
    called = regard.trace(subject, PAIRS, target=lambda output: output.square().sum(-1)).score
    torch.testing.assert_close(called.values, t.output.square().sum(-1))
    with pytest.raises(errors.WrongTarget, match=r"'unbelievably' is 5 tokens.*produced"):
        regard.trace(subject, PAIRS, target="unbelievably")
    with pytest.raises(errors.WrongTarget, match="1 entries for 2"):
        regard.trace(subject, PAIRS, target=[None])
    assert subject.encode(PAIRS).said == t.score.index  # what was produced, not what is most probable
    assert t.score.index != tuple(t.output.argmax(-1).tolist())


@pytest.mark.parametrize("inputs", [TEXTS, PAIRS], ids=["generated", "forced"])
@pytest.mark.parametrize("token", [0, 1, -1])
def test_a_batch_is_its_singles_and_padding_is_zero(subject, inputs, token):
    subject = subject.at(token)
    subject.model.double()
    together = regard.trace(subject, inputs, gradients=True)
    for example, entry in enumerate(inputs):
        alone = regard.trace(subject, entry, gradients=True)
        torch.testing.assert_close(together.output[example], alone.output[0], atol=1e-9, rtol=1e-9)
        assert together.score.names[example] == alone.score.names[0]
        for many, one in ((together, alone), (together.source, alone.source)):
            assert many.features[example] == one.features[0]
        for many, one in zip(together.sites, alone.sites, strict=True):
            assert many.kind == one.kind
            rows, keys = many.real[example].nonzero()[:, 0], many.real_keys[example].nonzero()[:, 0]
            few, seen = one.real[0].nonzero()[:, 0], one.real_keys[0].nonzero()[:, 0]
            for ask in ("weights", "gradients"):
                big, small = getattr(many, ask)()[example], getattr(one, ask)()[0]
                torch.testing.assert_close(big[:, rows][..., keys], small[:, few][..., seen], atol=1e-9, rtol=1e-9)
            assert many.weights()[example][:, :, ~many.real_keys[example]].eq(0).all()
            assert many.weights()[example][:, ~many.real[example]].eq(0).all()


def test_source_and_rows_never_have_the_same_length(subject):
    pair = ("a film", "a film")
    batch = subject.encode(pair)
    assert (batch.real.shape[1], batch.source.real.shape[1]) == (4, 5)
    assert batch.source.real.tolist() == [[True] * 4 + [False]]
    assert batch.inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 0]]
    t = regard.trace(subject, pair)
    assert [site.kind for site in t.sites] == ["encoder"] * 2 + ["decoder", "cross"] * 2
    plain = {name: value[:, :4] for name, value in batch.inputs.items()}
    with torch.no_grad():
        torch.testing.assert_close(t.output, subject.model(**plain).logits[:, -1], atol=1e-5, rtol=1e-5)


def test_one_trace_is_read_from_every_row(subject):
    t = regard.trace(subject, PAIRS)
    for k in (0, 2, -1):
        read = t.at(k)
        again = regard.trace(subject.at(k), PAIRS)
        assert torch.equal(read.readout, again.readout)
        assert read.readout.dtype == again.readout.dtype
        assert (read.score, read.check.readout[:12]) == (None, "not measured")
        for site, other in zip(read.sites[2:], again.sites[2:], strict=True):
            looks = site.pull(read.readout)
            torch.testing.assert_close(looks, other.pull(again.readout), atol=1e-6, rtol=0)
            torch.testing.assert_close(looks.sum(-1), torch.ones(2))
        if k >= 0:
            assert t.sites[2].pull(read.readout)[:, k + 1 :].eq(0).all()  # what was produced before, no more
    assert t.score is not None
    counts = t.real.sum(-1).tolist()
    for k in (min(counts), -min(counts) - 1):
        with pytest.raises(errors.NoSuchPart, match=rf"token={k} is not there.*{counts[0]}, {counts[1]}"):
            t.at(k)


def test_rows_count_real_tokens_in_decoders_padded_on_the_left(smollm):
    t = regard.trace(smollm, ["The capital of France is", "One two"])
    assert t.at(0).readout.tolist() == [[1, 0, 0, 0, 0], [0, 0, 0, 1, 0]]
    assert torch.equal(t.at(-1).readout, t.readout)
    pooled = regard.trace(regard.pooled(regard.models.toys.decisive()), "so so good so")
    with pytest.raises(errors.NoSuchPart, match="no other can be chosen"):
        pooled.at(0)


def test_no_gradient_reaches_what_comes_later(subject):
    k = 2
    t = regard.trace(subject.at(k), PAIRS, gradients=True)
    for site in t.sites[2:]:
        gradients = site.gradients()
        assert gradients[:, :, k + 1 :].eq(0).all()
        assert gradients[:, :, k].ne(0).any()
    assert t.sites[0].gradients().ne(0).any()


def test_the_model_is_afterwards_as_it_was(model, tokenizer):
    model.train()
    model.encoder.eval() if hasattr(model, "encoder") else model.model.encoder.eval()
    modes = [module.training for module in model.modules()]
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    config = model.generation_config.to_dict()
    subject = regard.seq2seq(model, tokenizer, most=5)
    one, two = (regard.trace(subject, TEXTS, gradients=True).output for _ in range(2))
    assert torch.equal(one, two)  # no dropout
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.generation_config.to_dict() == config


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ("", errors.EmptyInput, r"inputs\[0\]"),
        ([], errors.EmptyInput, "inputs is empty"),
        (("a", " "), errors.EmptyInput, r"inputs\[0\]"),
        ([("", "a")], errors.EmptyInput, r"inputs\[0\]"),
        ([("a", "a"), ("a", "\u200b")], errors.EmptyInput, r"inputs\[1\].*no tokens"),
        ("\u200b", errors.EmptyInput, "no tokens"),
        (3, errors.InputError, "inputs=3"),
        ([3], errors.InputError, r"inputs\[0\]=3"),
        (("a", "b", "c"), errors.InputError, "a pair of texts"),
        (["a", ("b", "c")], errors.InputError, "mixes"),
        (["a", "film " * 60], errors.TooLong, r"inputs\[1\] has 62 tokens.*takes 40.*truncate"),
        ([("a", "b"), ("a", "film " * 60)], errors.TooLong, r"inputs\[1\]: the produced text has 62 tokens.*takes 40.*truncate"),
        (("film " * 38, "film " * 38), errors.TooLong, "both have 40 tokens"),
    ],
)  # fmt: skip
def test_inputs_that_cannot_be_used(bart, tokenizer, inputs, error, message):
    with pytest.raises(error, match=message):
        regard.trace(regard.seq2seq(bart, tokenizer), inputs)


def test_over_the_limit(tokenizer, bart):
    long = "film " * 60
    cut = regard.seq2seq(bart, tokenizer, over_limit="truncate")
    assert regard.trace(cut, (long, "a long film")).source.real.shape == (1, 40)
    assert regard.trace(cut, ("a film", long)).real.shape == (1, 40)
    t5 = regard.seq2seq(build("T5", tokenizer), tokenizer, over_limit="allow", most=2)
    assert regard.trace(t5, ("film " * 600, long)).source.real.shape == (1, 602)


@pytest.mark.parametrize("token", [5, -6])
def test_a_token_that_was_not_produced(subject, token):
    message = rf"token={token} is not there: inputs\[1\] has 5 produced tokens.*0 to 4.*-1 to -5"
    with pytest.raises(errors.NoSuchPart, match=message):
        regard.trace(subject.at(token), [("a", "it never ever ends"), ("a", "it never ends")])


def test_the_last_position_there_is(bart, tokenizer):
    t = regard.trace(regard.seq2seq(bart, tokenizer).at(39), ("a", "film " * 38))
    assert t.check.readout == "measured"


def test_what_is_no_encoder_decoder(tokenizer, classifier, smollm, bart, tmp_path):
    whole = {"T5": hf.T5Model(hf.T5Config(vocab_size=len(tokenizer), **T5)), "BART": hf.BartModel(bart.config)}
    for model in (classifier, smollm.model, *whole.values()):
        with pytest.raises(
            errors.SubjectError,
            match=r"(classifies|encodes) texts: use regard\.text|predicts next tokens: use regard\.causal",
        ):
            regard.seq2seq(model, tokenizer)
    classifier.save_pretrained(tmp_path)
    with pytest.raises(errors.SubjectError, match=r"classifies texts: use regard\.text"):
        regard.seq2seq(tmp_path, tokenizer)
    hf.T5EncoderModel(hf.T5Config(vocab_size=len(tokenizer), **T5)).save_pretrained(tmp_path)
    with pytest.raises(errors.SubjectError, match=r"encodes texts: use regard\.text"):
        regard.seq2seq(tmp_path, tokenizer)
    with pytest.raises(errors.NotAModel, match="does not exist"):
        regard.seq2seq(tmp_path / "nowhere")
    with pytest.raises(errors.NotAModel, match=r"regard\.module"):
        regard.seq2seq(lambda x: x)


def test_options_and_tokenizers_that_do_not_fit(bart, tokenizer, smollm):
    for option, value in (("special", "remove"), ("over_limit", "cut"), ("most", 0)):
        with pytest.raises(errors.OptionError, match=f"{option}={value!r}"):
            regard.seq2seq(bart, tokenizer, **{option: value})
    with pytest.raises(errors.TokenizerMismatch, match="another model"):
        regard.seq2seq(bart, smollm.tokenizer)
    with pytest.raises(errors.TokenizerMismatch, match="Pass the tokenizer"):
        regard.seq2seq(bart)
    bart.generation_config.update(decoder_start_token_id=None, bos_token_id=None)
    with pytest.raises(errors.SubjectError, match="decoder_start_token_id"):
        regard.trace(regard.seq2seq(bart, tokenizer), PAIRS)


def test_text_sends_encoder_decoders_here(model, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    for given in (model, tmp_path):
        with pytest.raises(errors.SubjectError, match=r"regard\.seq2seq"):
            regard.text(given, tokenizer)


def test_a_saved_model_comes_back(model, subject, tokenizer, tmp_path):
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded = regard.seq2seq(str(tmp_path), most=12)
    one, two = (regard.trace(each, "a moving film") for each in (subject, loaded))
    assert torch.equal(one.output, two.output)
    assert (one.features, one.score.names) == (two.features, two.score.names)


def test_the_command_line_takes_them(bart, tokenizer, tmp_path):
    bart.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    regard_here = str(Path(sys.executable).with_name("regard"))
    command = [regard_here, "trace", "--model", str(tmp_path), "--text", "a moving film", "--text", "dull", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert [site["kind"] for site in report["sites"]] == ["encoder"] * 2 + ["decoder", "cross"] * 2
    assert report["readout"] == "measured"
