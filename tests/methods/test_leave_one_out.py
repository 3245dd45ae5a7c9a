"""Leave-one-out against inputs that are made by hand, one at a time: shorter ids, another token, keys that are not there.

Words are those of the tokenizer's own ``word_ids``; each shortened text runs alone, in float64, without padding.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers as hf
from oracles import SMALL, assert_close, bert, llama, seeded, t5
from test_gradient import SIDES, WORDS, ids_of_words, lstm, pictures, pooled_logits, table, twin, vit
from tokenizers import Tokenizer, models, pre_tokenizers

import regard
from regard import errors

TEXTS = ["a moving film", "dull, and it never ends: an unbelievably overlong movie", "so", "so so film so"]
HOWS = ("delete", "mask", "pad", "attention")


# --- by hand --------------------------------------------------------------------------------------------------------


def places(encoding, unit="word"):
    """The rows of each word, or of each token but the special ones."""
    words = encoding.word_ids()
    rows = [row for row, word in enumerate(words) if word is not None]
    if unit == "token":
        return [[row] for row in rows]
    return [[row for row in rows if words[row] == word] for word in sorted({words[row] for row in rows})]


def less(ids, rows, how, tokenizer):
    """The ids of a text without some."""
    if how == "delete":
        return [token for row, token in enumerate(ids) if row not in rows]
    other = {"mask": tokenizer.mask_token_id, "pad": tokenizer.pad_token_id}[how]
    return [other if row in rows else token for row, token in enumerate(ids)]


def logits_of(model, ids):
    """Of a classifier, or of the next token."""
    with torch.no_grad():
        found = model(input_ids=torch.tensor([ids])).logits[0]
    return found if found.dim() == 1 else found[-1]


def without(model, tokenizer, ids, rows, how):
    if how == "attention":
        return logits_of(twin(model, gone=rows), ids)
    return logits_of(model, less(ids, rows, how, tokenizer))


def tvd(before, after):
    return float((before.softmax(-1) - after.softmax(-1)).abs().sum() / 2)


def on_tokens(count, removed, effects):
    """The tokens of a word share what is found for it."""
    scores = np.zeros(count)
    for rows, effect in zip(removed, effects, strict=True):
        scores[rows] = effect / len(rows)
    return scores


def left_out(model, tokenizer, text, how, apart=tvd, unit="word"):
    encoding = tokenizer(text)
    ids, removed = encoding["input_ids"], places(encoding, unit)
    before = logits_of(model, ids)
    effects = [apart(before, without(model, tokenizer, ids, rows, how)) for rows in removed]
    return on_tokens(len(ids), removed, effects)


def assert_each(found, expected):
    for why, one in zip(found, expected, strict=True):
        assert_close(why.scores, one)


def explained(subject, inputs, **options):
    return regard.explain(subject, inputs, method="leave_one_out", **options)


# --- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["word", "token"])
@pytest.mark.parametrize("how", HOWS)
def test_a_classifier(subject, model, tokenizer, how, unit):
    """Texts of very different lengths, words of several pieces, a word that is there three times, a single one."""
    assert any(len(rows) > 1 for rows in places(tokenizer(TEXTS[1])))
    found = explained(subject, TEXTS, how=how, unit=unit)
    expected = [left_out(model, tokenizer, text, how, unit=unit) for text in TEXTS]
    assert_each(found, expected)
    assert_each([explained(subject, text, how=how, unit=unit) for text in TEXTS], expected)
    for why in found:
        assert why.scores[[0, -1]].tolist() == [0, 0], "special tokens stay"


@pytest.mark.parametrize("how", HOWS)
@SIDES
def test_a_decoder(tokenizer, build, side, how):
    model = build(tokenizer)
    subject = regard.causal(model, tokenizer, padding_side=side)
    found = explained(subject, TEXTS, how=how)
    assert_each(found, [left_out(model, tokenizer, text, how) for text in TEXTS])


def test_deletion_is_what_happens_where_nothing_is_said(subject, model, tokenizer):
    assert_each(explained(subject, TEXTS), [left_out(model, tokenizer, text, "delete") for text in TEXTS])


def test_the_effect_on_a_word_is_that_of_all_its_pieces(subject, model, tokenizer):
    words = explained(subject, TEXTS[1]).words()
    encoding = tokenizer(TEXTS[1])
    before = logits_of(model, encoding["input_ids"])
    expected = [
        tvd(before, without(model, tokenizer, encoding["input_ids"], rows, "delete")) for rows in places(encoding)
    ]
    np.testing.assert_allclose(words["score"].to_numpy()[~words["special"]], expected, rtol=1e-9)


def test_by_how_much_what_is_explained_falls(subject, model, tokenizer):
    """Signed, and of the target that was: what was predicted, a class, one rather than another."""
    firsts = [int(logits_of(model, tokenizer(text)["input_ids"]).argmax()) for text in TEXTS]
    scalars = [lambda p: p[firsts[0]], lambda p: p[2], lambda p: p[0] - p[1], lambda p: p[firsts[3]]]
    for how in ("delete", "attention"):
        found = explained(subject, TEXTS, how=how, effect="signed", target=[None, 2, (0, 1), None])
        expected = [
            left_out(model, tokenizer, text, how, lambda a, b, f=scalar: float(f(a.softmax(-1)) - f(b.softmax(-1))))
            for text, scalar in zip(TEXTS, scalars, strict=True)
        ]
        assert_each(found, expected)
    assert any(
        int(logits_of(model, less(tokenizer(text)["input_ids"], rows, "delete", tokenizer)).argmax()) != first
        for text, first in zip(TEXTS[::3], firsts[::3], strict=True) for rows in places(tokenizer(text))
    ), "another class is predicted without some word, or this proves nothing"  # fmt: skip
    logits = explained(subject, TEXTS[0], effect="signed", of="logit", target=1).scores
    assert_close(logits, left_out(model, tokenizer, TEXTS[0], "delete", lambda a, b: float(a[1] - b[1])))


def test_pairs_of_texts_keep_their_types(subject, model, tokenizer):
    """Also where the first text loses its only word."""
    pair = ("so", "a moving film")
    encoding = tokenizer(*pair)
    ids, types = encoding["input_ids"], encoding["token_type_ids"]
    rows = [row for row, word in enumerate(encoding.word_ids()) if word is not None]

    def run(gone):
        kept = [row for row in range(len(ids)) if row != gone]
        inputs = {"input_ids": torch.tensor([ids])[:, kept], "token_type_ids": torch.tensor([types])[:, kept]}
        with torch.no_grad():
            return model(**inputs).logits[0]

    expected = on_tokens(len(ids), [[row] for row in rows], [tvd(run(None), run(row)) for row in rows])
    assert_close(explained(subject, [pair, ("dull, and it never ends", "so")])[0].scores, expected)


def test_several_labels_a_number_and_an_encoder(tokenizer):
    """The mean over labels; the change of the number; the change of the function of the output."""
    base = bert(tokenizer).config.to_diff_dict()
    for kind, apart in (
        (
            {"num_labels": 3, "problem_type": "multi_label_classification"},
            lambda a, b: float((a.sigmoid() - b.sigmoid()).abs().mean()),
        ),
        ({"num_labels": 1}, lambda a, b: float((a - b).abs())),
    ):
        config = hf.BertConfig(**base | kind)
        model = seeded(lambda config=config: hf.BertForSequenceClassification(config))
        found = explained(regard.text(model, tokenizer), TEXTS)
        assert_each(found, [left_out(model, tokenizer, text, "delete", apart) for text in TEXTS])
    model = bert(tokenizer, hf.BertModel)
    subject = regard.text(model, tokenizer, readout="mean")

    def function(ids):
        with torch.no_grad():
            return float(model(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)[3])

    for effect in ("tvd", "signed"):
        for why, text in zip(explained(subject, TEXTS, effect=effect, target=lambda x: x[:, 3]), TEXTS, strict=True):
            encoding = tokenizer(text)
            ids, removed = encoding["input_ids"], places(encoding)
            effects = [function(ids) - function(less(ids, rows, "delete", tokenizer)) for rows in removed]
            expected = on_tokens(len(ids), removed, effects)
            assert_close(why.scores, np.abs(expected) if effect == "tvd" else expected)
    with pytest.raises(errors.WrongTarget, match="needs a function"):
        explained(subject, TEXTS)


def test_a_verbalizer(tokenizer):
    """The total variation is that of the distribution over its classes."""
    model = llama(tokenizer)
    subject = regard.causal(model, tokenizer, verbalizer={"positive": "good", "negative": "bad"})
    ids = [tokenizer.convert_tokens_to_ids(word) for word in ("good", "bad")]
    expected = [left_out(model, tokenizer, text, "delete", lambda a, b: tvd(a[ids], b[ids])) for text in TEXTS]
    assert_each(explained(subject, TEXTS), expected)


def unmarked():
    """A decoder and its tokenizer, which adds no special tokens and has none for masks."""
    words = ["[PAD]", "[UNK]", "so", "dull", "film"]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    plain = hf.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")
    config = hf.GPT2Config(vocab_size=5, **SMALL, bos_token_id=None, eos_token_id=None, pad_token_id=0)
    return seeded(lambda: hf.GPT2LMHeadModel(config)), plain


def test_nothing_is_left():
    """A text without special tokens keeps one row, with padding in it; what attends to nothing gives nothing."""
    model, plain = unmarked()
    for side in ("left", "right"):
        subject = regard.causal(model, plain, padding_side=side)
        for how in ("delete", "pad", "attention"):
            found = explained(subject, ["film", "so dull film"], how=how)
            assert_close(found[1].scores, left_out(model, plain, "so dull film", how))
            after = without(model, plain, [4], [0], how) if how == "attention" else logits_of(model, [0])
            assert_close(found[0].scores, [tvd(logits_of(model, [4]), after)])


# --- what is produced -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["delete", "pad", "attention"])
@pytest.mark.parametrize("unit", ["word", "token"])
def test_each_token_of_a_continuation(tokenizer, how, unit):
    """Over its prefix alone, which ends in the middle of a word: then the rest of it takes no part."""
    model = llama(tokenizer)
    prompt = tokenizer("so dull,")["input_ids"]
    later = tokenizer("an overlong film", add_special_tokens=False)["input_ids"]
    words = [[1], [2], [3], [5], [6, 7], [8]]  # [CLS] so dull , [SEP] an over ##long film
    assert len(prompt) + len(later) == 9
    found = explained(regard.causal(model, tokenizer), "so dull,", continuation="an overlong film", how=how, unit=unit)
    for place, why in enumerate(found):
        ids = prompt + later[:place]
        removed = [[row for row in rows if row < len(ids)] for rows in words if rows[0] < len(ids)]
        if unit == "token":
            removed = [[row] for rows in removed for row in rows]
        before = logits_of(model, ids)
        effects = [tvd(before, without(model, tokenizer, ids, rows, how)) for rows in removed]
        assert_close(why.scores, on_tokens(len(ids), removed, effects))
        if unit == "word":
            by_word = why.words()
            np.testing.assert_allclose(by_word["score"].to_numpy()[~by_word["special"]], effects, rtol=1e-9)


def test_what_a_decoder_goes_on_with(tokenizer):
    model = llama(tokenizer)
    found = explained(regard.causal(model, tokenizer), "so dull", generate=2, effect="signed", of="logprob")
    ids = tokenizer("so dull")["input_ids"]
    for why in found:
        token = int(logits_of(model, ids).argmax())
        removed = [[row] for row, one in enumerate(ids) if one not in tokenizer.all_special_ids]
        before = logits_of(model, ids).log_softmax(-1)[token]
        after = [without(model, tokenizer, ids, rows, "delete").log_softmax(-1)[token] for rows in removed]
        assert_close(why.scores, on_tokens(len(ids), removed, [float(before - one) for one in after]))
        ids = [*ids, token]
    assert len(found) == 2


def said_by(model, ids, taken, rows, how, tokenizer):
    """The next token's logits of an encoder–decoder whose source lacks some rows."""
    if how == "attention":
        model, kept = twin(model, gone=rows), ids
    else:
        kept = less(ids, rows, how, tokenizer)
    with torch.no_grad():
        return model(input_ids=torch.tensor([kept]), decoder_input_ids=torch.tensor([taken])).logits[0, -1]


@pytest.mark.parametrize("how", HOWS)
def test_an_encoder_decoder(tokenizer, how):
    """Words of the source are removed; a source that is as long as what is produced has a row of padding more."""
    model = t5(tokenizer)
    subject = regard.seq2seq(model, tokenizer)
    pairs = [
        ("a moving film", "so it is"),
        ("so", "dull"),
        ("dull, an overlong movie", "it is an unbelievably long film"),
    ]
    assert len(tokenizer(pairs[0][0])["input_ids"]) == len(tokenizer(pairs[0][1])["input_ids"])
    found = explained(subject, pairs, how=how)
    alone = [explained(subject, pair, how=how) for pair in pairs]
    for why, one, (source, text) in zip(found, alone, pairs, strict=True):
        encoding, said = tokenizer(source), tokenizer(text)["input_ids"]
        ids, taken = encoding["input_ids"], [model.config.decoder_start_token_id, *said[:-1]]
        removed = places(encoding)
        before = said_by(model, ids, taken, [], "mask", tokenizer)
        effects = [tvd(before, said_by(model, ids, taken, rows, how, tokenizer)) for rows in removed]
        for some in (why, one):
            assert some.parts == {"source": len(ids)}
            assert_close(some.scores, on_tokens(len(ids), removed, effects))


def test_each_token_of_a_translation(tokenizer):
    model = t5(tokenizer)
    found = explained(regard.seq2seq(model, tokenizer), "dull, an overlong movie", generate=2)
    encoding, taken = tokenizer("dull, an overlong movie"), [model.config.decoder_start_token_id]
    for why in found:
        before = said_by(model, encoding["input_ids"], taken, [], "mask", tokenizer)
        effects = [
            tvd(before, said_by(model, encoding["input_ids"], taken, rows, "delete", tokenizer))
            for rows in places(encoding)
        ]
        assert_close(why.scores, on_tokens(len(encoding["input_ids"]), places(encoding), effects))
        taken.append(int(before.argmax()))
    assert len(found) == 2


# --- pooled encoders ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marks", [False, True], ids=["words alone", "between marks"])
@pytest.mark.parametrize("task", ["binary", "multiclass", "multilabel"])
@pytest.mark.parametrize("how", HOWS)
def test_an_lstm(how, task, marks):
    """As in the paper: for a binary output |Δŷ|. A text that loses its only word keeps a row with padding in it."""
    model, vocabulary = lstm(marks, task=task, classes=1 if task == "binary" else 3)

    def run(ids, attended):
        with torch.no_grad():
            found = pooled_logits(model, model.encoder.embedding(torch.tensor([ids])), attended)
        if task == "multiclass":
            return found.softmax(-1)
        return found.sigmoid()

    def apart(one, other):
        far = (one - other).abs()
        return float({"binary": far.sum(), "multiclass": far.sum() / 2, "multilabel": far.mean()}[task])

    found = explained(regard.pooled(model, vocabulary), WORDS, how=how)
    for why, text in zip(found, WORDS, strict=True):
        ids = ids_of_words(vocabulary, text)
        rows = range(1, len(ids) - 1) if marks else range(len(ids))
        expected = np.zeros(len(ids))
        for row in rows:
            kept, attended = list(ids), list(rows)
            if how == "delete" and len(rows) > 1:
                kept, attended = ids[:row] + ids[row + 1 :], attended[:-1]
            elif how == "attention":
                attended.remove(row)
            else:
                kept[row] = vocabulary["<unk>" if how == "mask" else "<pad>"]
            expected[row] = apart(run(ids, list(rows)), run(kept, attended))
        assert_close(why.scores, expected)


# --- pictures and tables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["mask", "attention", None])
def test_a_picture(how):
    """A patch has the mean colour of its picture, or no weight; the first is what happens where nothing is said."""
    model = vit()
    found = explained(regard.image(model), pictures(), how=how)
    for why, picture in zip(found, pictures(), strict=True):
        expected = [0.0]
        with torch.no_grad():
            before = model(picture[None]).logits[0]
            for row in range(2):
                for column in range(3):
                    if how == "attention":
                        after = twin(model, gone=[1 + 3 * row + column])(picture[None]).logits[0]
                    else:
                        other = picture.clone()
                        patch = (slice(8 * row, 8 * row + 8), slice(8 * column, 8 * column + 8))
                        for channel in range(3):
                            other[(channel, *patch)] = picture[channel].mean()
                        after = model(other[None]).logits[0]
                    expected.append(tvd(before, after))
        assert_close(why.scores, expected)
    for cannot in ("delete", "pad"):
        with pytest.raises(errors.NotServed, match=f"leave_one_out: how='{cannot}'.*Use 'mask' or 'attention'"):
            explained(regard.image(model), pictures(), how=cannot)


@pytest.mark.parametrize("how", ["mask", None])
def test_a_table_with_a_baseline(how):
    mean = torch.tensor([0.5, -1.0, 0.0, 2.0], dtype=torch.float64)
    model, subject, rows = table(baseline=mean)
    for why, row in zip(explained(subject, rows, how=how), rows, strict=True):
        expected = [0.0]
        with torch.no_grad():
            for column in range(4):
                other = row.clone()
                other[column] = mean[column]
                expected.append(tvd(model(row[None], None)[0], model(other[None], None)[0]))
        assert_close(why.scores, expected)


def test_a_table_without_one_loses_attention(monkeypatch):
    """rtdl forms its weights itself: the softmax is written anew here, with a key that is not there."""
    import torch.nn.functional as F

    model, subject, rows = table()
    found = explained(subject, rows)
    plain = F.softmax
    for why, row in zip(found, rows, strict=True):
        expected = [0.0]
        for column in range(5):

            def softmax(scores, dim, column=column):
                hidden = torch.arange(5) == column
                return plain(scores.masked_fill(hidden, -torch.inf) if column else scores, dim)

            with torch.no_grad():
                monkeypatch.setattr(F, "softmax", softmax)
                after = model(row[None], None)[0]
                monkeypatch.setattr(F, "softmax", plain)
                if column:
                    expected.append(tvd(model(row[None], None)[0], after))
        assert_close(why.scores, expected)
    for how in ("delete", "mask", "pad"):
        with pytest.raises(errors.NotServed, match=f"how='{how}'.*Use how='attention', or pass baseline="):
            explained(subject, rows, how=how)


# --- the rest -------------------------------------------------------------------------------------------------------


def test_half_precision(model, tokenizer):
    """Probabilities are compared in float32, so that they differ in more than eight bits."""
    half = regard.text(bert(tokenizer).to(torch.bfloat16), tokenizer)
    why = explained(half, TEXTS[1])
    assert why.scores.dtype == np.float32
    expected = left_out(half.model, tokenizer, TEXTS[1], "delete", lambda a, b: tvd(a.float(), b.float()))
    np.testing.assert_allclose(why.scores, expected, rtol=0, atol=0.02 * expected.max())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"how": "drop"}, "how='drop' is not known. Choose one of 'delete', 'mask', 'pad', 'attention'"),
        ({"unit": "sentence"}, "unit='sentence' is not known. Choose one of 'word', 'token'"),
        ({"effect": "absolute"}, "effect='absolute' is not known. Choose one of 'tvd', 'signed'"),
    ],
)
def test_options_that_are_refused(subject, options, said):
    with pytest.raises(errors.OptionError, match=said):
        explained(subject, "so", **options)


def test_a_tokenizer_without_a_mask():
    with pytest.raises(errors.NotServed, match="how='mask': the tokenizer has no mask token. Use 'delete', 'pad'"):
        explained(regard.causal(*unmarked()), "so", how="mask")
