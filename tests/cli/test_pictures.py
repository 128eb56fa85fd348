"""`zoo generate --image`, `zoo chat --image` and `zoo info` of a model that reads images with its texts."""

import io
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.pictures import FIXTURES, GEMMA3_TEMPLATE, write_gemma3, write_picture, write_tokenizer
from zoo.generate import conversation
from zoo.text import ChatTemplate
from zoo.text.chat.images import encode_with_images
from zoo.text.tokenizers import FileTokenizer
from zoo.weights.resolve import open_checkpoint

EOT = 77
SEEN = "<start_of_image>"


@pytest.fixture(scope="module")
def gemma3(tmp_path_factory):
    return write_gemma3(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    return [write_picture(folder / f"{seed}.png", seed) for seed in range(2)]


def read_tokenizer(directory):
    return FileTokenizer(directory / "tokenizer.json", 80)


def process(directory, files):
    config = zoo.images.read_image_config(directory)
    return zoo.images.preprocess_images(files, config), config


def answer(directory, tokens, processed, count):
    """The tokens that one call of `zoo.generate` gives, and their text."""
    images = None if processed is None else zoo.images.join_rows([processed])
    new = zoo.generate(zoo.load(directory), jnp.array([tokens]), images=images, max_new_tokens=count, stop_tokens=[EOT])
    new = [token for token in np.asarray(new)[0].tolist() if token >= 0]
    return new, read_tokenizer(directory).decode(new)


def ask(directory, prompt, files, count=8):
    """The text that follows a prompt whose placeholders stand where they do."""
    processed, config = process(directory, files)
    text = zoo.images.expand_placeholders(prompt, processed, config)
    tokenizer = read_tokenizer(directory)
    return answer(directory, [1, *tokenizer.encode(text).tolist()], processed, count)[1]


def test_a_prompt_has_its_picture_where_the_placeholder_is(run, gemma3, files):
    words = ["--max-new-tokens", 8]
    inside = run("generate", gemma3, "--image", files[0], "--prompt", f"Who is {SEEN} here?", *words)[0]
    assert inside == ask(gemma3, f"Who is {SEEN} here?", files[:1]) + "\n"
    first = run("generate", gemma3, "--image", files[0], "--prompt", "Who is here?", *words)[0]
    assert first == ask(gemma3, f"{SEEN}Who is here?", files[:1]) + "\n"
    two = run("generate", gemma3, "Two?", "--image", files[0], "--image", files[1], *words)[0]
    assert two == ask(gemma3, f"{SEEN}{SEEN}Two?", files) + "\n"
    without = run("generate", gemma3, "Who is here?", *words)[0]
    assert len({inside, first, two, without}) == 4


def test_several_prompts_read_the_same_pictures(run, gemma3, files):
    words = ["generate", gemma3, "--image", files[0], "--max-new-tokens", 6, "--no-stream"]
    out, _ = run(*words, "--prompt", f"What {SEEN}?", "--prompt", "Where is it?")
    alone = [run(*words, "--prompt", prompt)[0] for prompt in (f"What {SEEN}?", "Where is it?")]
    assert out == "".join(f"--- {number}\n{text}" for number, text in enumerate(alone, start=1))


def test_a_prompt_of_token_ids_with_a_picture(run, refused, gemma3, files):
    tokens = [1, 74, 73, 73, 73, 73, 75, 9]
    out = run("generate", gemma3, "--tokens", *tokens, "--image", files[0], "--max-new-tokens", 5)[0]
    assert out == answer(gemma3, tokens, process(gemma3, files[:1])[0], 5)[1] + "\n"
    wrong = refused("generate", gemma3, "--tokens", 1, 73, "--image", files[0])
    assert "row 0 has 1 image tokens (73), and its images have 4 features" in wrong


def test_paligemma_writes_bos_behind_the_picture(run, files, tmp_path):
    folder = tmp_path / "paligemma"
    shutil.copytree(FIXTURES / "image_text" / "paligemma_image", folder)
    special = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, "<image>": 73}
    write_tokenizer(folder, special)
    settings = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 8, "width": 8}}
    settings |= {"processor_class": "PaliGemmaProcessor", "image_seq_length": 4}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    out = run("generate", folder, "caption", "--image", files[0], "--max-new-tokens", 5, "--stop-token")[0]
    tokenizer = read_tokenizer(folder)
    tokens = [*[73] * 4, 1, *tokenizer.encode("caption\n").tolist()]
    new = zoo.generate(
        zoo.load(folder),
        jnp.array([tokens]),
        images=zoo.images.join_rows([process(folder, files[:1])[0]]),
        max_new_tokens=5,
    )
    assert out == tokenizer.decode(np.asarray(new)[0]) + "\n"


def test_pictures_that_are_refused_before_anything_is_loaded(refused, gemma3, files, text_model, tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "load", None)
    (tmp_path / "notes.png").write_text("words")
    for command, *words in (("generate", "--prompt", "a"), ("chat",)):
        words += ["--no-compile-cache"]
        of_texts = refused(command, text_model, *words, "--image", files[0])
        assert f"0.png: {text_model} is of the family llama, which reads no pictures" in of_texts
        assert "notes.png is not an image" in refused(command, gemma3, *words, "--image", tmp_path / "notes.png")
        assert "none.png" in refused(command, gemma3, *words, "--image", tmp_path / "none.png")
        bare = FIXTURES / "image_text" / "llava_clip"
        assert "has no preprocessor_config.json" in refused(command, bare, *words, "--image", files[0])


def test_prompts_with_other_placeholders(refused, gemma3, files):
    wrong = refused("generate", gemma3, f"{SEEN} {SEEN}", "--image", files[0])
    assert f"the text has 2 placeholders {SEEN} and there are 1 pictures" in wrong
    drafted = refused("generate", gemma3, "a", "--image", files[0], "--draft", "prompt")
    assert "draft: the first token comes with a prompt that is read in one piece" in drafted


@pytest.fixture
def talk(run, monkeypatch):
    """Run `zoo chat` with lines of standard input; return what it prints."""

    def talk(lines, *words):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", *words, "--no-compile-cache")

    return talk


def say(text):
    return {"type": "text", "text": text}


def expect(directory, messages, count):
    """What the model answers to these messages, all read at once."""
    tokenizer = read_tokenizer(directory)
    config = zoo.images.read_image_config(directory)
    template = ChatTemplate.read(directory)
    tokens, images = encode_with_images(template, messages, config, tokenizer, add_generation_prompt=True)
    return answer(directory, tokens.tolist(), images, count)[1]


def test_a_chat_reads_its_pictures_with_the_first_turn(talk, gemma3, files, tmp_path, monkeypatch):
    looked = []
    read = conversation.read_images
    monkeypatch.setattr(conversation, "read_images", lambda *args, **rest: looked.append(1) or read(*args, **rest))
    saved = tmp_path / "chat.json"
    lines = ["Who is it?", f"And {SEEN}?", f"/save {saved}"]
    pictures = ["--image", files[0], "--image", files[1]]
    out, error = talk(lines, gemma3, *pictures, "--system", "Be brief.", "--max-new-tokens", 6)
    assert error == "" and looked == [1], "later turns go on after the caches"
    messages = json.loads(saved.read_text())
    shown = [{"type": "image", "path": str(file)} for file in files]
    assert messages[:2] == [
        {"role": "system", "content": [say("Be brief.")]},
        {"role": "user", "content": [*shown, say("Who is it?")]},
    ]
    first, second = (message["content"][0]["text"] for message in messages[2::2])
    assert out == f"{first}\n{second}\nwrote {saved}\n"
    assert first == expect(gemma3, messages[:2], 6)
    assert messages[3]["content"] == [say(f"And {SEEN}?")], "a placeholder that is typed is text"
    blind, _ = talk(["Who is it?"], gemma3, "--system", "Be brief.", "--max-new-tokens", 6)
    assert blind != f"{first}\n"


def test_a_chat_begins_anew_with_a_picture(talk, gemma3, files, tmp_path):
    saved = tmp_path / "chat.json"
    lines = ["Hi", f"/image {files[1]}", "Who is it?", "/image", f"/image {tmp_path}/none.png", f"/save {saved}"]
    out, error = talk(lines, gemma3, "--max-new-tokens", 5)
    messages = json.loads(saved.read_text())
    assert messages[0] == {"role": "user", "content": [{"type": "image", "path": str(files[1])}, say("Who is it?")]}
    assert messages[1]["content"] == [say(expect(gemma3, messages[:1], 5))]
    assert "/image FILE: the name of a file is missing" in out and "none.png" in error
    talk([*lines[:3], "/reset", "And now?", f"/save {saved}"], gemma3, "--max-new-tokens", 5)
    again = json.loads(saved.read_text())
    assert again[0]["content"] == [{"type": "image", "path": str(files[1])}, say("And now?")]
    assert again[1]["content"] == [say(expect(gemma3, again[:1], 5))]


def copy_with_template(directory, folder, source):
    shutil.copytree(directory, folder)
    (folder / "chat_template.jinja").write_text(source)
    return folder


def test_templates_that_have_no_place_for_a_picture(talk, refused, gemma3, files, tmp_path, capsys):
    strings = copy_with_template(gemma3, tmp_path / "a", "{% for m in messages %}{{ m.content }}{% endfor %}")
    message = refused("chat", strings, "--image", files[0], "--no-compile-cache")
    assert f"{files[0]}: a picture needs a place in the chat template, and {strings}/chat_template.jinja has" in message
    dropping = copy_with_template(gemma3, tmp_path / "b", GEMMA3_TEMPLATE.replace("<start_of_image>", ""))
    out, error = talk(["Hi"], dropping, "--image", files[0], "--max-new-tokens", 2)
    assert out == "" and f"writes {SEEN} 0 times, and the messages have 1 pictures" in error
    without = copy_with_template(gemma3, tmp_path / "c", "")
    (without / "chat_template.jinja").unlink()
    with pytest.raises(SystemExit):
        talk([], without, "--image", files[0])
    assert "this model has none: zoo generate --image takes a prompt instead" in capsys.readouterr().err


def test_a_chat_in_words_with_a_model_of_images(talk, gemma3, tmp_path):
    saved = tmp_path / "chat.json"
    strings = copy_with_template(gemma3, tmp_path / "a", "{% for m in messages %}{{ m.content }}{% endfor %}")
    talk(["Hi", f"/save {saved}"], strings, "--max-new-tokens", 2)
    assert json.loads(saved.read_text())[0] == {"role": "user", "content": "Hi"}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("gemma3_image", "ImageEncoder of 2 layers, PooledProjector: 4 features of an image of 16 x 16 pixels"),
        ("llava_clip", "ImageEncoder of 3 layers, MLPProjector: 9 features of an image of 12 x 12 pixels"),
    ],
)
def test_info_names_tower_projector_and_features(run, name, line):
    folder = FIXTURES / "image_text" / name
    out, _ = run("info", folder)
    model = zoo.load(folder)
    facts = [row.split(maxsplit=1) for row in out.splitlines() if row]
    count = lambda tree: sum(x.size for x in jax.tree.leaves(tree))  # with layers that nothing reads
    assert ["images", line] in facts and ["parameters", f"{count(model):,}"] in [[a, b[:6]] for a, b in facts]
    for part in ("tower", "projector", "decoder"):
        assert f"{part}: {count(getattr(model, part)):,} " in out
    trained = f"{zoo.count(model):,} of them trainable"
    assert (trained in out) == (zoo.count(model) < count(model))
    assert "64 tokens" in out, "the cache of the decoder"
    found = json.loads(run("info", folder, "--json")[0])
    assert found["images"]["features"] == model.projector.count_features(model.tower.embedding.positions.grid)
    assert found["cache"] and found["tied"] == (model.decoder.head is None)
    assert "attention (Attention, layers" in run("info", folder, "--platform", "cpu")[0]
    assert str(zoo.summary(model)).split("images")[1].split("\n")[0].strip() == line
    assert open_checkpoint(folder).family.name == found["family"]
