"""The recipe end to end, on a mesh: questions about digits, and chats for a checkpoint with its tower frozen."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import image_sft
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.text.chat.images import encode_with_images
from zoo.text.chat.template import ChatTemplate
from zoo.train.digits import list_digit_questions, load_digits

pytestmark = pytest.mark.ci

TINY = {
    "seq_len": 48, "batch_size": 8, "steps": 2, "warmup_steps": 1, "eval_every": 1, "held_out": 16,
    "data_processes": 1, "fsdp": 2, "tensor": 2,
}  # fmt: skip


@pytest.fixture
def few_questions(monkeypatch):
    """Let the recipe draw 64 pictures to train on, not thousands."""
    draw = lambda digits, count, **options: list_digit_questions(digits, min(count, 64), **options)
    monkeypatch.setattr(image_sft, "list_digit_questions", draw)


def write_chats(folder):
    """Write a checkpoint, `start`, and a file of 40 chats, `chats.jsonl`, next to their pictures."""
    image_sft.make_start(folder / "start")
    with (folder / "chats.jsonl").open("w") as file:
        for number, record in enumerate(list_digit_questions(load_digits()[0], 40)):
            picture, question = record["messages"][0]["content"]
            (folder / f"{number}.png").write_bytes(picture["bytes"])
            content = [{"type": "image", "path": f"{number}.png"}, question]
            file.write(json.dumps({"messages": [{"role": "user", "content": content}, record["messages"][1]]}) + "\n")
    return {"checkpoint": folder / "start", "data": (str(folder / "chats.jsonl"),)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    write_chats(folder)
    return folder


def tower_is_trained(before, after):
    """Return True if any array of the tower differs between two checkpoints."""
    towers = [jax.tree.leaves(zoo.load(directory).tower) for directory in (before, after)]
    return any(bool((x != y).any()) for x, y in zip(*towers, strict=True))


@pytest.mark.usefixtures("few_questions")
def test_image_sft_learns_exports_and_reports(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    call(image_sft.main, out=tmp_path / "run", **TINY)
    lines = train.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2] and lines[1]["validation"] < lines[0]["validation"]
    assert "nats per trained token after 2 steps on" in capsys.readouterr().out
    report = (tmp_path / "run" / "report.html").read_text()
    for part in ('aria-label="Pictures with answers"', "answered to the letter", "Which digit is the largest?"):
        assert part in report
    check_optimization(tmp_path / "run")
    assert tower_is_trained(tmp_path / image_sft.Config.checkpoint, tmp_path / "run" / "export")


@pytest.mark.usefixtures("without_samples")
def test_a_checkpoint_learns_from_chats_with_a_frozen_tower(folder, tmp_path):
    """And what is left reads a picture with nothing but its own files."""
    data = {"checkpoint": folder / "start", "data": (str(folder / "chats.jsonl"),)}
    call(image_sft.main, out=tmp_path, **data, **TINY)
    lines = train.read_metrics(tmp_path / "metrics.jsonl")
    assert lines[1]["validation"] < lines[0]["validation"]
    export = tmp_path / "export"
    assert not tower_is_trained(folder / "start", export)
    report = (tmp_path / "report.html").read_text()
    assert "decoder.layers.*.attention.query.weight" in report and "tower.layers" not in report
    model, config = zoo.load(export), zoo.images.read_image_config(export)
    tokenizer = zoo.text.tokenizers.read_tokenizer(export, 257)
    content = [{"type": "image", "path": str(folder / "0.png")}, {"type": "text", "text": "Which digit?"}]
    messages = [{"role": "user", "content": content}]
    tokens, images = encode_with_images(ChatTemplate.read(export), messages, config, tokenizer)
    assert (tokens == 256).sum() == 16
    assert model(jnp.asarray(tokens)[None], zoo.images.join_rows([images])).shape == (1, len(tokens), 257)


@pytest.mark.usefixtures("without_samples")
def test_adapters_are_of_the_decoder_and_merge(folder, tmp_path):
    data = {"checkpoint": folder / "start", "data": (str(folder / "chats.jsonl"),), "lora": 2, "microbatches": 2}
    call(image_sft.main, out=tmp_path, **data, **TINY)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert all(name.startswith("language_model.model.layers.") for name in config["target_modules"])
    base, merged = zoo.load(folder / "start"), zoo.load(tmp_path / "export")
    tuned = zoo.adapters.load(base, tmp_path / "adapter")
    tokens = jnp.asarray([[256] * 16 + [87, 104, 105]])
    images = jax.random.normal(jax.random.key(0), (1, 1, 3, 16, 16))
    np.testing.assert_allclose(tuned(tokens, images), merged(tokens, images), atol=1e-4)
    assert np.abs(np.asarray(base(tokens, images) - merged(tokens, images))).max() > 1e-4


def test_the_last_of_several_answers_is_asked_for(folder):
    config = image_sft.Config(data=(str(folder / "two.jsonl"),), seq_len=96)
    content = [{"type": "image", "path": "0.png"}, {"type": "text", "text": "First?"}]
    turns = [("user", content), ("assistant", "a"), ("user", "Second?"), ("assistant", "bc")]
    lines = []
    for number in range(2):
        content[0]["path"] = f"{number}.png"
        lines.append(json.dumps({"messages": [{"role": role, "content": said} for role, said in turns]}))
    (folder / "two.jsonl").write_text("\n".join(lines))
    data, test = image_sft.load_data(config, folder / "start")
    questions = image_sft.Questions(data, test.rows, 1)
    assert questions.answers == ["bc"] and questions.texts == ["First?aSecond?"]
    assert (questions.tokens == 256).sum() == 16 and questions.pictures[0].shape == (16, 16, 3)
    assert questions.compare(["bc"]) == {"exact_match": 1} and questions.compare(["b"]) == {"exact_match": 0}


def complaint(capsys, *words):
    """Return the line that the command ends with."""
    with pytest.raises(SystemExit) as stopped:
        train.run_cli(image_sft.main, image_sft.Config, arguments=[str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_image_sft_bad_input_is_one_message(folder, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    given = ("--checkpoint", folder / "start", "--data")
    assert "preprocessor_config.json" in complaint(capsys, "--checkpoint", start, "--data", folder / "chats.jsonl")
    (tmp_path / "lost.jsonl").write_text((folder / "chats.jsonl").read_text())
    assert "lost.jsonl:1: there is no picture" in complaint(capsys, *given, "lost.jsonl")
    (tmp_path / "texts.jsonl").write_text('{"text": "a"}\n')
    error = complaint(capsys, *given, "texts.jsonl")
    assert "the kind of the records is text, expected one of chat, completion" in error
    error = complaint(capsys, *given, folder / "chats.jsonl", "--quantization", "nf4")
    assert "add --lora 16 to train adapters" in error
    assert not (tmp_path / "runs").exists()
