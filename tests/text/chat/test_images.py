"""Pictures in conversations: templates write placeholders, which become as many tokens as transformers writes."""

import json

import numpy as np
import PIL.Image
import pytest

import zoo
from tests.pictures import CONFIGS, FIXTURES, GEMMA3_SPECIAL, GEMMA3_TEMPLATE, write_picture, write_tokenizer
from zoo.images import preprocess_images
from zoo.text import ChatTemplate
from zoo.text.chat.encode import encode_spans
from zoo.text.chat.errors import ChatError
from zoo.text.chat.images import encode_with_images, reads_parts, render_with_images
from zoo.text.chat.template import PLAIN_TEMPLATE, RenderedChat, mark_spans, take_spans
from zoo.text.tokenizers import FileTokenizer

RUNS = json.loads((FIXTURES / "images" / "placeholders.json").read_text())
PARTS = (
    "{%% for part in m.content %%}{%% if part.type == 'image' %%}%s{%% else %%}{{ part.text }}{%% endif %%}"
    "{%% endfor %%}"
)
LLAVA = (
    "{% for m in messages %}{{ m.role | upper }}: {% for part in m.content | selectattr('type', 'equalto', 'image') %}"
    "<image>\n{% endfor %}{% for part in m.content | selectattr('type', 'equalto', 'text') %}"
    "{% if m.role == 'assistant' %}{% generation %}{{ part.text }} {% endgeneration %}{% else %}{{ part.text }} "
    "{% endif %}{% endfor %}{% endfor %}"
)
QWEN = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' or 'image' in part or 'image_url' in part %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SMOLVLM = (
    "<|im_start|>{% for m in messages %}{{ m.role | capitalize }}{% if m.content[0].type == 'image' %}:{% else %}: "
    "{% endif %}" + PARTS % "<image>" + "<end_of_utterance>\n{% endfor %}"
)
SIZES = {"llava": 64, "gemma3": 4, "qwen2_vl": None, "smolvlm": 4}
TEMPLATES = {"llava": LLAVA, "gemma3": GEMMA3_TEMPLATE, "qwen2_vl": QWEN, "smolvlm": SMOLVLM}
SPECIAL = {
    "llava": ["<image>"],
    "gemma3": list(GEMMA3_SPECIAL),
    "qwen2_vl": ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"],
    "smolvlm": [
        *("<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>", "<image>", "<global-img>"),
        *(f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)),
    ],
}
OF_TURNS = ("<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>", "<end_of_utterance>")


def read_config(case: str) -> dict:
    facts = {"model_type": case, "image_seq_length": SIZES[case]}
    return {**CONFIGS[case], **{key: value for key, value in facts.items() if value is not None}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """All special tokens of all families, and characters."""
    special = dict.fromkeys(["<pad>", "<bos>", "<eos>", "<unk>", *(x for words in SPECIAL.values() for x in words)])
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory, {word: number for number, word in enumerate(special)}, vocab=256)
    return FileTokenizer(directory / "tokenizer.json", 256)


def ask(*parts: dict, answer: str | None = None) -> list[dict]:
    said = [] if answer is None else [{"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    return [{"role": "user", "content": list(parts)}, *said]


def say(text: str) -> dict:
    return {"type": "text", "text": text}


def show(*size: int) -> dict:
    return {"type": "image", "image": np.full((size[1], size[0], 3), 99, np.uint8)}


@pytest.mark.parametrize("case", TEMPLATES)
def test_pictures_become_the_tokens_of_transformers(case, tokenizer):
    """Those that the processor of transformers writes for two pictures of these sizes."""
    sizes = RUNS[case]["images"]
    template = ChatTemplate(TEMPLATES[case], {"bos_token": "<bos>"})
    messages = ask(say("Look "), *(show(*size) for size in sizes), say(" now"))
    tokens, images = encode_with_images(template, messages, read_config(case), tokenizer)
    spelled = {number: word for word, number in tokenizer.special_tokens.items() if word not in OF_TURNS}
    wanted = [word for word, count in RUNS[case]["runs"] for _ in range(count) if word in SPECIAL[case]]
    assert [spelled[token] for token in tokens.tolist() if token in spelled] == wanted
    assert len(images.shapes) == len(sizes) == 2


def test_a_rendered_chat_word_for_word(tokenizer):
    messages = ask(show(40, 30), say(" Who? "), answer="Ann")
    gemma = ChatTemplate(GEMMA3_TEMPLATE, {"bos_token": "<bos>"})
    text, spans, images = render_with_images(
        gemma, messages, read_config("gemma3"), tokenizer, add_generation_prompt=True
    )
    assert text == (
        "<bos><start_of_turn>user\n\n\n<start_of_image>"
        + "<image_soft_token>" * 4
        + "<end_of_image>\n\nWho?<end_of_turn>\n"
        "<start_of_turn>model\nAnn<end_of_turn>\n<start_of_turn>model\n"
    )
    assert spans == () and images.pixels.shape == (1, 3, 32, 32)
    qwen = render_with_images(ChatTemplate(QWEN), messages, read_config("qwen2_vl"), tokenizer)
    rows, columns = qwen.images.shapes[0]
    assert qwen.text.startswith(
        "<|im_start|>user\n<|vision_start|>" + "<|image_pad|>" * (rows * columns) + "<|vision_end|> Who? <|im_end|>\n"
    )
    assert render_with_images(gemma, ask(say("Hi")), {}, tokenizer) == (
        "<bos><start_of_turn>user\nHi<end_of_turn>\n", (), None
    )  # fmt: skip


def test_spans_move_with_the_text(tokenizer):
    messages = [*ask(show(40, 30), say("Who?"), answer="Ann"), *ask(show(9, 9), show(9, 9), say("And?"), answer="Bob")]
    chat = render_with_images(ChatTemplate(LLAVA), messages, read_config("llava"), tokenizer)
    assert chat.text.count("<image>") == 3 * 64
    assert [chat.text[start:stop] for start, stop in chat.spans] == ["Ann ", "Bob "]
    encoded = encode_spans(chat.text, chat.spans, tokenizer)
    assert tokenizer.decode(encoded.tokens[encoded.mask]) == "Ann Bob "
    literal = RenderedChat("a\ufdd0b\ufdd3c", ((0, 1), (1, 1), (2, 5)))
    assert take_spans(mark_spans(literal)) == literal


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_placeholder_that_a_user_types_is_text(case, tokenizer):
    template = ChatTemplate(TEMPLATES[case], {"bos_token": "<bos>"})
    typed = "".join(SPECIAL[case])
    config = read_config(case)
    plain, _ = encode_with_images(template, ask(show(40, 30), say("see")), config, tokenizer)
    tokens, images = encode_with_images(template, ask(show(40, 30), say("see" + typed)), config, tokenizer)
    special = list(tokenizer.special_tokens.values())
    special.remove(tokenizer.special_tokens["<unk>"])  # of characters without a letter
    np.testing.assert_array_equal(tokens[np.isin(tokens, special)], plain[np.isin(plain, special)])
    assert len(tokens) > len(plain) and len(images.shapes) == 1


def test_pictures_are_files_bytes_and_images(tokenizer, tmp_path):
    path = write_picture(tmp_path / "a.png")
    given = [path, str(path), path.read_bytes(), PIL.Image.open(path)]
    config = read_config("llava")
    wanted = preprocess_images([path], config).pixels
    for picture in given:
        for key in ("image", "path"):
            messages = ask({"type": "image", key: picture}, say("?"))
            before = dict(messages[0]["content"][0])
            _, images = encode_with_images(ChatTemplate(LLAVA), messages, config, tokenizer)
            np.testing.assert_array_equal(images.pixels, wanted)
            assert messages[0]["content"][0] == before


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [{"type": "video", "path": "a.mp4"}],
            "message 1 has a part of the type 'video': expected a text, or an image",
        ),
        ([{"type": "image_url", "image_url": "a"}], "message 1 has a part of the type 'image_url'"),
        (["words"], "message 1 has a part of the type None"),
        ([{"type": "text"}], "message 1 has a part of text: expected a text"),
        ([{"type": "image"}], "message 1 has an image with nothing else: expected one picture, as image or path"),
        ([{"type": "image", "url": "https://a/b.png"}], "message 1 has an image with url: expected one picture"),
        ([{"type": "image", "path": "a", "image": "b"}], "message 1 has an image with path, image: expected one"),
        ([{"type": "image", "image": "https://a/b.png"}], "an image at https://a/b.png, which is not downloaded"),
    ],
)
def test_parts_that_are_not_read(parts, message, tokenizer):
    with pytest.raises(ChatError, match=message):
        render_with_images(ChatTemplate(QWEN), [*ask(say("a")), *ask(*parts)], read_config("qwen2_vl"), tokenizer)


def test_templates_without_a_place_for_pictures(tokenizer, tmp_path):
    dropping = ChatTemplate("{% for m in messages %}" + PARTS % "" + "{% endfor %}", name="a.jinja")
    messages = ask(show(9, 9), say("?"))
    with pytest.raises(
        ChatError, match="a.jinja writes <image> 0 times, and the messages have 1 pictures: it takes them"
    ):
        render_with_images(dropping, messages, read_config("llava"), tokenizer)
    twice = ChatTemplate("{% for m in messages %}" + PARTS % "<image><image>" + "{% endfor %}")
    with pytest.raises(ChatError, match="writes <image> 2 times, and the messages have 1 pictures"):
        render_with_images(twice, messages, read_config("llava"), tokenizer)
    with pytest.raises(ChatError, match=r"\[IMG\] stands for a picture, and is not a special token of the tokenizer"):
        render_with_images(twice, messages, {**CONFIGS["pixtral"], "model_type": "pixtral"}, tokenizer)
    with pytest.raises(ValueError, match="model_type = llama of the config: expected one of llava"):
        render_with_images(twice, messages, {"model_type": "llama"}, tokenizer)
    with pytest.raises(ChatError, match="does not render these messages: the content of a message is expected as one"):
        render_with_images(ChatTemplate(PLAIN_TEMPLATE), messages, read_config("llava"), tokenizer)
    alone = {"image_processor_type": "CLIPImageProcessor", "model_type": "llava"}
    with pytest.raises(ValueError, match="CLIPImageProcessor makes images without a text: processor_class of"):
        render_with_images(ChatTemplate(LLAVA), messages, alone, tokenizer)
    (tmp_path / "a.png").write_text("words")
    with pytest.raises(ValueError, match=r"a.png is not an image: expected a file that Pillow opens"):
        broken = ask({"type": "image", "path": tmp_path / "a.png"}, say("?"))
        render_with_images(ChatTemplate(LLAVA), broken, read_config("llava"), tokenizer)


def test_templates_that_read_parts():
    assert all(reads_parts(ChatTemplate(source, {"bos_token": "<bos>"})) for source in TEMPLATES.values())
    strings = "{% for m in messages %}{{ m.content }}{% endfor %}"
    for source in (
        PLAIN_TEMPLATE,
        strings,
        strings.replace("content", "content | tojson"),
        "text",
        "{{ messages.no.no }}",
    ):
        assert not reads_parts(ChatTemplate(source))


def test_the_images_are_those_that_the_model_reads(tokenizer):
    config = read_config("llava")
    tokens, images = encode_with_images(ChatTemplate(LLAVA), ask(show(40, 30), say("?")), config, tokenizer)
    assert zoo.images.join_rows([images]).shape == (1, 1, 3, 32, 32)
    assert (tokens == tokenizer.special_tokens["<image>"]).sum() == 64
