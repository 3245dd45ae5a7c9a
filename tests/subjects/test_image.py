"""Vision transformers: rows, patches, readout, classes, texts as classes, and what is refused."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image

import regard
from regard import errors

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "patch_size": 8}
VISION = SMALL | {"image_size": 32}
LABELS = {"id2label": {0: "cat", 1: "dog", 2: "tax form"}, "label2id": {"cat": 0, "dog": 1, "tax form": 2}}
TEXTS = ["a photo of a cat", "a photo of a dog", "tax form"]


def rough(model):
    """Large random weights: the small ones of a new model give nearly uniform attention, right or wrong."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def vit(kind=hf.ViTForImageClassification, config=hf.ViTConfig, **options):
    """24×32 pixels: 3 rows and 4 columns of patches, so that the two cannot be mixed up unseen."""
    return rough(kind(config(**(SMALL | {"image_size": (24, 32)} | LABELS | options))))


def processor(height=24, width=32):
    return hf.ViTImageProcessorPil(size={"height": height, "width": width}, image_mean=[0.5, 0.4, 0.3])


def letters():
    """A tokenizer of single letters, made as CLIP's is."""
    names = ["<|startoftext|>", "<|endoftext|>", *(chr(code) for code in range(97, 123))]
    names += [f"{letter}</w>" for letter in names[2:]]
    return hf.CLIPTokenizer(vocab={name: index for index, name in enumerate(names)}, merges=[])


def clip(kind=hf.CLIPModel, config=hf.CLIPConfig):
    text = SMALL | {"vocab_size": 54, "max_position_embeddings": 24}
    text |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    text.pop("patch_size")
    return rough(kind(config(vision_config=VISION, text_config=text)))


def clip_processor():
    pictures = hf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    return hf.CLIPProcessor(pictures, letters())


def photo(height=24, width=32):
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def subject():
    return regard.image(vit(), processor())


MODELS = {
    "vit": (vit, ("[CLS]",), [0]),
    "vit encoder": (lambda: vit(hf.ViTModel), ("[CLS]",), [0]),
    "vit encoder without a pooler": (lambda: hf.ViTModel(hf.ViTConfig(**VISION), add_pooling_layer=False), ("[CLS]",), [0]),
    "deit": (lambda: vit(hf.DeiTForImageClassification, hf.DeiTConfig), ("[CLS]", "[DIST]"), [0]),
    "deit with teacher": (lambda: vit(hf.DeiTForImageClassificationWithTeacher, hf.DeiTConfig), ("[CLS]", "[DIST]"), [0, 1]),
    "beit, mean of patches": (lambda: hf.BeitForImageClassification(hf.BeitConfig(**VISION)), ("[CLS]",), [*range(1, 17)]),
    "clip": (clip, ("[CLS]",), [0]),
    "clip vision": (lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**VISION)), ("[CLS]",), [0]),
    "clip projected": (lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**VISION)), ("[CLS]",), [0]),
    "siglip without its pool": (lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION, vision_use_head=False)), (), [*range(16)]),
    "registers": (lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**VISION, num_register_tokens=2)), ("[CLS]", "[REG 0]", "[REG 1]"), [0]),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_rows_and_weights_are_the_models_own(name):
    make, marks, rows = MODELS[name]
    model = rough(make())
    subject = regard.image(model)
    pixels = torch.randn(2, 3, *subject.layout.size)
    t = regard.trace(subject, pixels)
    (features,) = set(t.features)
    assert features.tokens[: len(marks)] == marks
    assert features.special == (True,) * len(marks) + (False,) * len(features.words)
    assert features.grid == ((3, 4) if subject.layout.size == (24, 32) else (4, 4))
    assert len(features.words) == features.grid[0] * features.grid[1]
    assert t.readout[0].nonzero().flatten().tolist() == rows
    torch.testing.assert_close(t.readout.sum(-1), torch.ones(2))
    assert t.check.readout == "measured"
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        run = getattr(eager, "get_image_features", eager)
        attentions = run(pixel_values=pixels, output_attentions=True).attentions
    assert len(t.sites) == len(attentions) == 2
    for site, wanted in zip(t.sites, attentions, strict=True):
        assert site.kind == "self"
        assert wanted.std() > 0.02  # there is something to get wrong
        torch.testing.assert_close(site.weights(), wanted, atol=1e-5, rtol=0)


def test_gradients_are_those_of_eager_attention(subject):
    t = regard.trace(subject, photo(), gradients=True, target="dog")
    eager = copy.deepcopy(subject.model)
    eager.set_attn_implementation("eager")
    output = eager(pixel_values=subject.encode(photo()).inputs["pixel_values"], output_attentions=True)
    for site, wanted in zip(t.sites, torch.autograd.grad(output.logits[0, 1], output.attentions), strict=True):
        torch.testing.assert_close(site.gradients(), wanted, atol=1e-5, rtol=0)


def test_a_model_that_pools_by_attention_ends_in_a_pool():
    subject = regard.image(hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)))
    t = regard.trace(subject, torch.randn(2, 3, 32, 32))
    assert [site.kind for site in t.sites] == ["self", "self", "pool"]
    assert t.sites[-1].pull(t.readout).shape == (2, 16)


def test_each_patch_is_the_row_that_it_is_called(subject):
    (features,) = subject.encode(photo()).features
    assert features.tokens == ("[CLS]", *(f"patch {row},{column}" for row in range(3) for column in range(4)))
    before = subject.model.vit.embeddings(subject.encode(photo()).inputs["pixel_values"])
    for row, column in ((0, 0), (1, 3), (2, 1)):
        changed = photo()
        changed[row * 8 : row * 8 + 8, column * 8 : column * 8 + 8] ^= 255
        after = subject.model.vit.embeddings(subject.encode(changed).inputs["pixel_values"])
        (moved,) = (after - before).abs().sum(-1)[0].nonzero().flatten().tolist()
        assert features.tokens[features.rows.index(moved)] == f"patch {row},{column}"


def test_picture_is_what_the_model_sees(subject):
    (seen,) = subject.picture(photo())
    assert seen.dtype == np.uint8
    assert np.array_equal(seen, photo())  # nothing to resize: every pixel comes back
    resized = Image.fromarray(photo(48, 64)).resize((32, 24), Image.Resampling.BILINEAR)
    assert np.array_equal(subject.picture(photo(48, 64))[0], np.asarray(resized))
    cropped = regard.image(clip(), clip_processor())
    (seen,) = cropped.picture(photo(32, 52))  # the shorter edge fits, the longer one is cut on both sides
    assert np.array_equal(seen, photo(32, 52)[:, 10:42])
    tensor = subject.encode(photo()).inputs["pixel_values"]
    assert np.array_equal(subject.picture(tensor)[0], photo())


def test_pixels_beyond_the_last_whole_patch_are_not_in_the_picture():
    subject = regard.image(vit(image_size=30), processor(30, 30))
    (seen,) = subject.picture(photo(30, 30))
    assert np.array_equal(seen, photo(30, 30)[:24, :24])
    assert subject.encode(photo(30, 30)).features[0].grid == (3, 3)


def test_pictures_come_in_many_forms(subject, tmp_path):
    wanted = regard.trace(subject, photo()).output
    Image.fromarray(photo()).save(tmp_path / "photo.png")
    turned, exif = Image.fromarray(photo()).transpose(Image.Transpose.ROTATE_90), Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees, as cameras write it
    turned.save(tmp_path / "turned.png", exif=exif)
    opaque = np.concatenate([photo(), np.full((24, 32, 1), 255, np.uint8)], axis=2)
    pixels = subject.encode(photo()).inputs["pixel_values"]
    forms = [
        Image.fromarray(photo()),
        str(tmp_path / "photo.png"),
        tmp_path / "turned.png",
        opaque,
        pixels[0],
        pixels.half(),
    ]
    for form in forms:
        precise = 1e-2 if getattr(form, "dtype", None) == torch.half else 0
        torch.testing.assert_close(regard.trace(subject, form).output, wanted, atol=precise, rtol=0)
    for several in ([*forms[1:4], pixels.double()[0]], np.stack([photo()] * 4), pixels.expand(4, -1, -1, -1)):
        torch.testing.assert_close(regard.trace(subject, several).output, wanted.expand(4, -1), atol=1e-5, rtol=0)


def test_grey_and_transparent_pictures_become_rgb(subject):
    grey = photo()[:, :, 0]
    assert np.array_equal(subject.picture(grey)[0], np.stack([grey] * 3, axis=-1))
    assert np.array_equal(subject.picture(Image.fromarray(grey))[0], subject.picture(grey)[0])
    clear = np.concatenate([photo(), np.zeros((24, 32, 1), np.uint8)], axis=2)
    assert (subject.picture(clear)[0] == 255).all()
    assert subject.picture(Image.fromarray(photo()).convert("P"))[0].shape == (24, 32, 3)


def test_classes_have_names(subject):
    t = regard.trace(subject, [photo(), photo()[::-1].copy()], target=["cat", ("dog", "tax form")])
    assert t.score.names == ("cat", "dog rather than tax form")
    torch.testing.assert_close(t.score.values, torch.stack([t.output[0, 0], t.output[1, 1] - t.output[1, 2]]))
    with torch.no_grad():
        direct = subject.model(**processor()(images=photo(), return_tensors="pt")).logits
    torch.testing.assert_close(t.output[:1], direct, atol=1e-6, rtol=0)
    renamed = regard.image(subject.model, processor(), labels=["Katze", "Hund", "Formular"])
    assert regard.trace(renamed, photo(), target="Hund").score.index == (1,)
    with pytest.raises(errors.WrongTarget, match="'horse' is not a label.*'cat', 'dog', 'tax form'"):
        regard.trace(subject, photo(), target="horse")
    with pytest.raises(errors.OptionError, match="2 names.*3 classes"):
        regard.image(subject.model, processor(), labels=["Katze", "Hund"])


def test_an_encoder_has_its_own_pooling_or_the_one_you_name():
    model = vit(hf.ViTModel)
    with torch.no_grad():
        own = model(**processor()(images=photo(), return_tensors="pt"))
    read = {how: regard.image(model, processor(), readout=how) for how in (None, "first", "mean")}
    wanted = {
        None: own.pooler_output,
        "first": own.last_hidden_state[:, 0],
        "mean": own.last_hidden_state[:, 1:].mean(1),
    }
    for how, subject in read.items():
        t = regard.trace(subject, photo())
        torch.testing.assert_close(t.output, wanted[how], atol=1e-5, rtol=0)
        assert t.score is None
        assert t.readout[0, 0] == (0 if how == "mean" else 1)
        assert t.check.readout == "measured"


def test_similarity_is_a_target(tmp_path):
    subject = regard.image(clip(), clip_processor())
    assert not subject.predicts
    Image.fromarray(photo(40, 40)).save(tmp_path / "other.png")
    t = regard.trace(subject, photo(), gradients=True, target=subject.similarity(tmp_path / "other.png"))
    assert t.score.names == (f"similarity to '{tmp_path / 'other.png'}'",)
    same = regard.trace(subject, photo(40, 40), target=subject.similarity(photo(40, 40)))
    assert same.score.names == ("similarity to another picture",)
    torch.testing.assert_close(same.score.values, torch.ones(1))
    with pytest.raises(errors.WrongTarget, match="similarity"):
        regard.trace(subject, photo(), gradients=True)
    with pytest.raises(errors.InputError, match="is a list"):
        subject.similarity([photo(), photo()])


def test_texts_are_the_classes_of_clip():
    model, both = clip(), clip_processor()
    subject = regard.image(model, both, labels=TEXTS)
    pictures = [photo(40, 60), photo(33, 32)]
    with torch.no_grad():
        own = model(**both(text=TEXTS, images=pictures, padding=True, return_tensors="pt")).logits_per_image
    assert own.std(-1).min() > 1e-3
    assert own.std(0).max() > 1e-3
    t = regard.trace(subject, pictures, target="tax form", of="probability")
    torch.testing.assert_close(t.output, own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(t.score.values, own.softmax(-1)[:, 2], atol=1e-5, rtol=0)
    assert {site.shape for site in t.sites} == {(2, 2, 17, 17)}  # the text half did not run
    assert (subject.predicts, t.score.names) == (True, ("tax form",) * 2)


def test_texts_are_the_classes_of_siglip():
    model = clip(hf.SiglipModel, hf.SiglipConfig)
    torch.nn.init.constant_(model.logit_bias, -1.5)
    both = clip_processor()
    subject = regard.image(model, both, labels=TEXTS)
    texts = both.tokenizer(TEXTS, padding="max_length", max_length=24, return_tensors="pt")
    with torch.no_grad():
        own = model(**texts, **both(images=photo(), return_tensors="pt")).logits_per_image
    t = regard.trace(subject, photo(), target=0, of="probability")
    torch.testing.assert_close(t.output, own, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(t.score.values, own.sigmoid()[:, 0], atol=1e-5, rtol=0)


def test_labels_that_cannot_be_classes():
    with pytest.raises(errors.OptionError, match="CLIPProcessor"):
        regard.image(clip(), clip_processor().image_processor, labels=TEXTS)
    with pytest.raises(errors.OptionError, match="ViTModel embeds pictures only"):
        regard.image(vit(hf.ViTModel), processor(), labels=TEXTS)
    with pytest.raises(errors.OptionError, match="labels='cat' must be a list"):
        regard.image(clip(), clip_processor(), labels="cat")
    with pytest.raises(errors.OptionError, match=r"labels=\[\] must be a list"):
        regard.image(clip(), clip_processor(), labels=[])
    with pytest.raises(errors.TooLong, match="a text of .* takes 24"):
        regard.image(clip(), clip_processor(), labels=["cat " * 20])
    with pytest.raises(errors.TokenizerMismatch, match="another model"):
        regard.image(clip(), hf.CLIPProcessor(clip_processor().image_processor, hf.CLIPTokenizer()), labels=TEXTS)


ROUNDING = {"rtol": 0, "atol": 1e-6}


def test_saved_models_come_back_and_say_nothing(tmp_path):
    model, matcher = vit(), clip()
    for name, live, made in (("vit", model, processor()), ("clip", matcher, clip_processor())):
        live.save_pretrained(tmp_path / name)
        made.save_pretrained(tmp_path / name)
    loaded = regard.image(tmp_path / "vit")
    live = regard.image(model, processor())
    # not bit for bit: on some machines rounding depends on where in memory the weights lie
    torch.testing.assert_close(regard.trace(loaded, photo()).output, regard.trace(live, photo()).output, **ROUNDING)
    assert regard.trace(loaded, photo(), target="dog").score.names == ("dog",)
    live = regard.image(matcher, clip_processor(), labels=TEXTS)
    for processor_of_it in (None, tmp_path / "clip"):
        match = regard.image(str(tmp_path / "clip"), processor_of_it, labels=TEXTS)
        torch.testing.assert_close(regard.trace(match, photo()).output, regard.trace(live, photo()).output, **ROUNDING)
        for name, one in match.model.state_dict().items():
            assert torch.equal(one, matcher.state_dict()[name]), name
    program = f"import regard; regard.image({str(tmp_path / 'vit')!r}); regard.image({str(tmp_path / 'clip')!r}, labels=['a'])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout + done.stderr == ""


def test_a_pooler_that_is_not_in_the_checkpoint_is_not_read(tmp_path):
    model = hf.ViTModel(hf.ViTConfig(**VISION), add_pooling_layer=False).eval()
    model.save_pretrained(tmp_path)
    processor(32, 32).save_pretrained(tmp_path)
    subject = regard.image(tmp_path)
    with torch.no_grad():
        own = model(pixel_values=subject.encode(photo(32, 32)).inputs["pixel_values"]).last_hidden_state[:, 0]
    torch.testing.assert_close(regard.trace(subject, photo(32, 32)).output, own, atol=1e-5, rtol=0)


def test_what_is_no_model(tmp_path):
    with pytest.raises(errors.NotAModel, match="does not exist"):
        regard.image(tmp_path / "nowhere")
    with pytest.raises(errors.NotAModel, match=r"without config.json"):
        regard.image(tmp_path)
    with pytest.raises(errors.NotAModel, match=r"regard\.module"):
        regard.image(lambda x: x)
    vit().save_pretrained(tmp_path)
    with pytest.raises(errors.NotAModel, match="processor"):
        regard.image(tmp_path)
    with pytest.raises(errors.NotAModel, match=r"processor='.*nowhere' could not be loaded"):
        regard.image(vit(), tmp_path / "nowhere")
    processor().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(vit().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(errors.NotAModel, match="safetensors"):
        regard.image(tmp_path)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: hf.SwinModel(hf.SwinConfig(image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2)), "64 rows.*8×8"),
        (lambda: hf.ViTMAEModel(hf.ViTMAEConfig(**VISION)), "5 rows"),
        (lambda: hf.ResNetModel(hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])), "no sizes"),
        (lambda: hf.ViTForMaskedImageModeling(hf.ViTConfig(**VISION)), "returns no logits"),
        (lambda: torch.nn.Linear(3, 3), "no sizes"),
    ],
)  # fmt: skip
def test_models_whose_rows_are_not_patches(model, message):
    with pytest.raises(errors.SubjectError, match=f"{message}.*regard.module"):
        regard.image(model())


def test_processors_of_other_models():
    with pytest.raises(errors.SubjectError, match=r"40×40 pixels.*processor"):
        regard.image(vit(), processor(40, 40))
    with pytest.raises(errors.SubjectError, match="processor=CLIPTokenizer"):
        regard.image(vit(), letters())


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ([], errors.EmptyInput, "inputs is empty"),
        (np.zeros((0, 24, 32, 3), np.uint8), errors.EmptyInput, "inputs is empty"),
        (np.zeros((0, 32, 3), np.uint8), errors.EmptyInput, r"inputs\[0\].*nothing to see"),
        (Image.new("RGB", (0, 5)), errors.EmptyInput, r"inputs\[0\].*0×5"),
        (None, errors.InputError, r"inputs\[0\]=None is a NoneType"),
        ([photo(), 3], errors.InputError, r"inputs\[1\]=3 is a int"),
        ("nowhere.png", errors.InputError, r"inputs\[0\]='nowhere.png' cannot be opened"),
        (__file__, errors.InputError, "cannot be opened as a picture"),
        (photo() / 255, errors.InputError, r"float64.*uint8"),
        (photo().transpose(2, 0, 1), errors.InputError, r"\(3, 24, 32\) of uint8.*height, width, 3"),
        (torch.zeros(3, 32, 24), errors.InputError, r"tensor \(3, 32, 24\).*\(3, 24, 32\)"),
        (torch.zeros(3, 24, 32, dtype=torch.uint8), errors.InputError, "torch.uint8.*floating-point"),
        (torch.zeros(24, 32), errors.InputError, r"tensor \(24, 32\)"),
    ],
)
def test_what_is_no_picture(subject, inputs, error, message):
    with pytest.raises(error, match=message):
        regard.trace(subject, inputs)


def test_without_a_processor():
    subject = regard.image(vit())
    assert regard.trace(subject, torch.zeros(3, 24, 32)).output.shape == (1, 3)
    with pytest.raises(errors.InputError, match=r"a ndarray, but without a processor.*\(3, 24, 32\).*processor="):
        regard.trace(subject, photo())
    with pytest.raises(errors.SubjectError, match="processor=None"):
        subject.picture(torch.zeros(3, 24, 32))


def test_without_pillow(subject, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(errors.SubjectError, match=r"regard\[image\]"):
        regard.trace(subject, "photo.png")


def test_readouts_that_are_none(subject):
    with pytest.raises(errors.OptionError, match="readout='last'.*Choose one of 'first', 'mean'"):
        regard.image(vit(), readout="last")
    with pytest.raises(errors.OptionError, match="special='remove'"):
        regard.image(vit(), special="remove")
    with pytest.raises(errors.OptionError, match=r"readout='first'.*no \[CLS\]"):
        regard.image(hf.SiglipVisionModel(hf.SiglipVisionConfig(**VISION)), readout="first")
    with pytest.raises(errors.ReadoutMismatch, match="rows 1, 2, 3"):
        regard.trace(regard.image(subject.model, processor(), readout="mean"), photo())


def test_half_precision_and_training_mode_are_kept(subject):
    model = copy.deepcopy(subject.model).to(torch.bfloat16).train()
    half = regard.image(model, processor())
    t = regard.trace(half, photo())
    assert t.output.dtype == torch.bfloat16
    assert model.training
    assert np.array_equal(half.picture(photo())[0], photo())
    torch.testing.assert_close(t.output.float(), regard.trace(subject, photo()).output, atol=0.05, rtol=0)
