"""Text classifiers and encoders: features, readout, targets, and what is refused."""

from __future__ import annotations

import shutil

import pytest
import torch
import transformers as hf

import regard
from regard import errors


@pytest.fixture
def subject(classifier, tokenizer):
    return regard.text(classifier, tokenizer)


def small(kind, tokenizer, **options):
    config = hf.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        **options,
    )  # fmt: skip
    return kind(config).eval()


def test_subwords_map_to_words_by_offsets_and_repeated_words_stay_apart(minilm):
    (features,) = minilm.encode("The unbelievably dull dull film's end.").features
    assert features.tokens[:4] == ("[CLS]", "the", "un", "##bel")
    assert features.words == ("The", "unbelievably", "dull", "dull", "film", "'", "s", "end", ".")
    assert features.special == (True,) + (False,) * (len(features.tokens) - 2) + (True,)
    assert [len(rows) for rows in features.rows_of_words] == [1, 5, 1, 1, 1, 1, 1, 1, 1]
    assert features.rows_of_words[2] != features.rows_of_words[3]


def test_pairs_keep_their_parts_apart(minilm):
    (features,) = minilm.encode(("a film", "film b")).features
    assert features.words == ("a", "film", "film", "b")
    assert features.tokens == ("[CLS]", "a", "film", "[SEP]", "film", "b", "[SEP]")
    batch = minilm.encode([("a film", "film b"), ("x", "y z")])
    assert batch.inputs["token_type_ids"].sum() == 6


def test_bytes_level_tokens_map_to_words(smollm):
    (features,) = smollm.encode("Une idée naïve, ici.").features
    assert features.words == ("Une", "idée", "naïve", ",", "ici", ".")
    assert all(word is not None for word in features.word)
    assert "".join(features.tokens).replace("\ufffd", "") != ""


def test_unknown_words_are_words(minilm):
    (features,) = minilm.encode("I love 🦄 so much").features
    assert features.words == ("I", "love", "🦄", "so", "much")
    assert minilm.encode("☃").features[0].words == ("☃",)


def test_odd_white_space_and_joiners(minilm, smollm):
    (features,) = smollm.encode("a  b\n\nc").features
    assert features.words == ("a", "b", "c")
    assert len(features.tokens) == len(features.word)
    assert smollm.encode("\n\nc").features[0].words[-1] == "c"
    assert minilm.encode("so\u00adso fine").features[0].words == ("so\u00adso", "fine")


def test_the_readout_of_a_classifier_is_measured(subject, tokenizer):
    assert subject.reading == "first"
    t = regard.trace(subject, ["a moving film", "dull"])
    assert t.readout.tolist() == [[1.0] + [0.0] * 4] * 2
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        num_labels=2, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    decoder = regard.text(hf.LlamaForSequenceClassification(config), tokenizer)
    assert decoder.reading == "last"
    assert regard.trace(decoder, ["a moving film", "dull"]).readout.argmax(-1).tolist() == [4, 2]


def test_sentence_encoders_pool_as_their_folder_says(minilm, minilm_path):
    assert minilm.reading == "mean"
    t = regard.trace(minilm, ["a moving film", "dull"])
    torch.testing.assert_close(t.readout[1], torch.tensor([1, 1, 1, 0, 0]) / 3)
    assert t.score is None  # no predicted class
    model = hf.AutoModel.from_pretrained(minilm_path)
    batch = minilm.encode("a moving film")
    with torch.no_grad():
        hidden = model(**batch.inputs).last_hidden_state
    torch.testing.assert_close(regard.trace(minilm, "a moving film").output, hidden.mean(1), atol=1e-5, rtol=0)
    assert regard.text(minilm_path, readout="first").reading == "first"


def test_similarity_is_a_target(minilm):
    near, far = (minilm.similarity(text) for text in ("a touching movie", "the tax form"))
    with torch.no_grad():
        output = minilm.forward(minilm.encode("a moving film"))
    assert near(output) > far(output)
    t = regard.trace(minilm, "a moving film", gradients=True, target=near)
    assert t.score.names == ("similarity to 'a touching movie'",)
    torch.testing.assert_close(t.score.values, near(output), atol=1e-5, rtol=0)


def test_targets(subject):
    texts = ["a moving film", "dull"]
    logits = regard.trace(subject, texts).output
    default = regard.trace(subject, texts)
    assert default.score.index == tuple(logits.argmax(-1).tolist())
    by_name = regard.trace(subject, texts, target="good").score
    torch.testing.assert_close(by_name.values, logits[:, 2])
    assert by_name.names == ("good", "good")
    torch.testing.assert_close(
        regard.trace(subject, texts, target=1, of="probability").score.values, logits.softmax(-1)[:, 1]
    )
    torch.testing.assert_close(
        regard.trace(subject, texts, target=0, of="logprob").score.values, logits.log_softmax(-1)[:, 0]
    )
    pair = regard.trace(subject, texts, target=("good", 0)).score
    torch.testing.assert_close(pair.values, logits[:, 2] - logits[:, 0])
    assert pair.names[0] == "good rather than bad"
    each = regard.trace(subject, texts, target=["good", "bad"]).score
    torch.testing.assert_close(each.values, torch.stack([logits[0, 2], logits[1, 0]]))
    called = regard.trace(subject, texts, target=lambda output: output.square().sum(-1)).score
    torch.testing.assert_close(called.values, logits.square().sum(-1))


def test_multi_label_and_regression_heads(tokenizer):
    many = regard.text(small(hf.BertForSequenceClassification, tokenizer, num_labels=3, problem_type="multi_label_classification"), tokenizer)  # fmt: skip
    t = regard.trace(many, "a film", target="LABEL_1", of="probability")
    torch.testing.assert_close(t.score.values, t.output.sigmoid()[:, 1])
    one = regard.text(small(hf.BertForSequenceClassification, tokenizer, num_labels=1), tokenizer)
    t = regard.trace(one, "a film")
    torch.testing.assert_close(t.score.values, t.output[:, 0])
    with pytest.raises(errors.WrongTarget, match="of='probability'.*regression"):
        regard.trace(one, "a film", of="probability")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (7, "target=7 is not there.*0 to 2"),
        (-1, "target=-1"),
        ("superb", "'superb' is not a label.*'bad', 'fair', 'good'"),
        (1.5, "target=1.5"),
        (True, "target=True"),
        (("good", "bad", "fair"), "pair"),
        (["good"], "1 entries for 2 examples"),
        (lambda output: 3.0, "returned float"),
        (lambda output: output, r"returned \(2, 3\)"),
    ],
)
def test_wrong_targets(subject, target, message):
    with pytest.raises(errors.WrongTarget, match=message):
        regard.trace(subject, ["a moving film", "dull"], target=target)


def test_a_plain_encoder_needs_a_target_for_gradients(minilm):
    with pytest.raises(errors.WrongTarget, match="similarity"):
        regard.trace(minilm, "a moving film", gradients=True)


@pytest.mark.parametrize(
    ("inputs", "error"),
    [("", errors.EmptyInput), ("  \n", errors.EmptyInput), ([], errors.EmptyInput), (["a", ""], errors.EmptyInput),
     ([3], errors.InputError),
        (None, errors.InputError), (["a", ("b", "c")], errors.InputError), (("a", ""), errors.EmptyInput)],
)  # fmt: skip
def test_empty_and_odd_inputs(minilm, inputs, error):
    with pytest.raises(error, match="inputs"):
        regard.trace(minilm, inputs)


def test_over_the_limit(classifier, tokenizer):
    long = "film " * 100  # the classifier has 64 positions
    with pytest.raises(errors.TooLong, match=r"102 tokens.*takes 64.*truncate"):
        regard.trace(regard.text(classifier, tokenizer), ["dull", long])
    cut = regard.trace(regard.text(classifier, tokenizer, over_limit="truncate"), long)
    assert cut.sites[0].shape[2] == 64
    config = hf.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64,
    )  # fmt: skip
    allowed = regard.causal(hf.LlamaForCausalLM(config), tokenizer, over_limit="allow")
    assert regard.trace(allowed, long).sites[0].shape[2] == 102


def test_positions_that_begin_after_the_padding(tokenizer):
    config = hf.RobertaConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=34, num_labels=2, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = hf.RobertaForSequenceClassification(config)
    most = 34 - tokenizer.pad_token_id - 1
    cut = regard.trace(regard.text(model, tokenizer, over_limit="truncate"), "film " * 100)
    assert cut.sites[0].shape[2] == most
    with pytest.raises(errors.TooLong, match=f"takes {most}"):
        regard.trace(regard.text(model, tokenizer), "film " * 100)


@pytest.mark.parametrize(
    ("option", "value"),
    [("readout", "pool"), ("special", "remove"), ("over_limit", "cut"), ("padding_side", "both")],
)
def test_options_that_are_none(classifier, tokenizer, option, value):
    with pytest.raises(errors.OptionError, match=f"{option}='{value}'.*Choose one of"):
        regard.text(classifier, tokenizer, **{option: value})
    with pytest.raises(errors.OptionError, match="of='odds'"):
        regard.trace(regard.text(classifier, tokenizer), "a", of="odds")


def test_a_tokenizer_of_another_model(classifier, smollm, tokenizer):
    with pytest.raises(errors.TokenizerMismatch, match="another model"):
        regard.text(classifier, smollm.tokenizer)  # more tokens than rows
    with pytest.raises(errors.TokenizerMismatch, match=r"30522 tokens of the 49152.*another model"):
        regard.causal(smollm.model, tokenizer)
    with pytest.raises(errors.TokenizerMismatch, match="Pass the tokenizer"):
        regard.text(classifier)


def test_what_is_no_model(tmp_path):
    with pytest.raises(errors.NotAModel, match="does not exist"):
        regard.text(tmp_path / "nowhere")
    with pytest.raises(errors.NotAModel, match=r"without config.json"):
        regard.text(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"\x80\x02pickle")
    with pytest.raises(errors.NotAModel, match="not a GGUF file"):
        regard.text(tmp_path / "model.bin")
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(errors.NotAModel, match="could not be loaded"):
        regard.text(tmp_path)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF and then nothing of use")
    with pytest.raises(errors.NotAModel, match="could not be loaded"):
        regard.causal(tmp_path / "broken.gguf")
    with pytest.raises(errors.NotAModel, match="regard.module"):
        regard.text(lambda x: x)


def test_pickled_weights_are_not_read(tmp_path, classifier, tokenizer):
    classifier.config.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    torch.save(classifier.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(errors.NotAModel, match="safetensors"):
        regard.text(tmp_path)


def test_a_saved_classifier_comes_back(tmp_path, classifier, tokenizer):
    classifier.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    live, loaded = regard.text(classifier, tokenizer), regard.text(str(tmp_path))
    assert torch.equal(regard.trace(live, "a film").output, regard.trace(loaded, "a film").output)
    assert regard.trace(loaded, "a film", target="good").score.names == ("good",)
    shutil.rmtree(tmp_path)


def test_a_decoder_is_sent_to_causal(tmp_path, tokenizer, smollm):
    config = hf.GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2)
    hf.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    for model in (tmp_path, smollm.model):
        with pytest.raises(errors.SubjectError, match=r"regard\.causal"):
            regard.text(model, tokenizer)


def test_a_gguf_file_is_read_as_an_encoder(smollm_path, smollm):
    subject = regard.text(smollm_path)
    t = regard.trace(subject, ["a moving film", "dull"])
    assert (len(t.sites), subject.reading, subject.predicts) == (30, "mean", False)
    causal = regard.trace(smollm, "dull")
    rows = list(t.features[1].rows)
    torch.testing.assert_close(
        t.sites[0].weights(rows=rows)[1][:, :, rows], causal.sites[0].weights()[0], atol=1e-5, rtol=0
    )


def test_a_language_model_head_is_sent_to_causal(tokenizer):
    model = small(hf.BertForMaskedLM, tokenizer)
    with pytest.raises(errors.SubjectError, match=r"\(example, class\).*regard\.causal"):
        regard.trace(regard.text(model, tokenizer), "a film")


def test_a_checkpoint_is_taken_for_what_it_was_saved_for(tmp_path, classifier, tokenizer):
    """A head that is not in the checkpoint would be random."""
    classifier.save_pretrained(tmp_path)
    with pytest.raises(errors.TokenizerMismatch, match="holds no tokenizer"):
        regard.text(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for make in (regard.causal, regard.seq2seq, regard.image):
        with pytest.raises(errors.SubjectError, match=r"classifies texts: use regard\.text"):
            make(tmp_path)
    classifier.bert.save_pretrained(tmp_path)
    with pytest.raises(errors.NotAModel, match="does not hold all of a BertLMHeadModel: cls.predictions"):
        regard.causal(tmp_path)
    assert repr(regard.text(tmp_path)) == "TextSubject(BertModel)"
    audio = hf.WhisperForConditionalGeneration(
        hf.WhisperConfig(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
                         encoder_ffn_dim=16, decoder_ffn_dim=16, vocab_size=60, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                         decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None)
    )  # fmt: skip
    with pytest.raises(errors.SubjectError, match=r"neither texts nor pictures: use regard\.module"):
        regard.seq2seq(audio, tokenizer)


def test_a_table_is_not_a_list_of_texts(minilm):
    import pandas as pd

    frame = pd.DataFrame({"text": ["a moving film", "dull"]})
    with pytest.raises(errors.InputError, match=r"inputs is a DataFrame: pass one column"):
        regard.trace(minilm, frame)
    with pytest.raises(errors.InputError, match=r"inputs is a dict: pass one column"):
        regard.trace(minilm, {"text": ["a"]})
    assert len(regard.trace(minilm, frame["text"]).features) == 2


def test_a_model_is_not_a_subject(minilm):
    for call in (regard.trace, regard.diagnose, lambda *args: regard.intervene(*args, [])):
        with pytest.raises(errors.SubjectError, match=r"is a BertModel, not a subject. Make one with regard\.text"):
            call(minilm.model, "a moving film")


class Slow(hf.PreTrainedTokenizer):
    """A tokenizer written in Python: it knows no character offsets. Pieces of at most three letters."""

    vocab_files_names: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, **options):
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "▁so", "▁goo", "d", "▁un", "goo"]
        self.table = {piece: number for number, piece in enumerate(pieces)}
        super().__init__(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", **options)

    @property
    def vocab_size(self):
        return len(self.table)

    def get_vocab(self):
        return dict(self.table)

    def _tokenize(self, text, **options):
        words = [f"▁{word}" for word in text.split()]
        cuts = [(word[:4], word[4:]) if len(word) > 4 else (word,) for word in words]
        return [piece for cut in cuts for piece in (("▁un", "goo", "d") if "".join(cut) == "▁ungood" else cut)]

    def _convert_token_to_id(self, token):
        return self.table.get(token, 1)

    def _convert_id_to_token(self, index):
        return list(self.table)[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens).replace("▁", " ").strip()

    def build_inputs_with_special_tokens(self, one, two=None):
        return [2, *one, 3]

    def get_special_tokens_mask(self, one, two=None, already_has_special_tokens=False):
        return (
            [int(token < 4 and token != 1) for token in one] if already_has_special_tokens else [1, *[0] * len(one), 1]
        )


def test_a_tokenizer_without_offsets_gives_words_by_what_its_tokens_say():
    config = hf.BertConfig(
        vocab_size=9, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=40, num_labels=2
    )
    subject = regard.text(hf.BertForSequenceClassification(config).eval(), Slow())
    t = regard.trace(subject, ["so ungood good", "so"])
    one, other = t.features
    assert one.words == ("so", "ungood", "good")
    assert one.word == (None, 0, 1, 1, 1, 2, 2, None)
    assert one.rows_of_words == ((1,), (2, 3, 4), (5, 6))
    assert other.words == ("so",)
    assert other.rows == (0, 1, 2)


def test_a_classifier_made_of_a_sentence_encoder_is_read_where_it_reads(minilm_path, minilm):
    """What the folder says of pooling is about the encoder."""
    config = hf.AutoConfig.from_pretrained(minilm_path, num_labels=3, num_hidden_layers=1)
    model = hf.BertForSequenceClassification(config).eval()
    assert model.config._name_or_path == str(minilm_path)
    assert minilm.reading == "mean"
    assert regard.text(model, minilm.tokenizer).reading == "first"
