"""Supervised fine-tuning from chats to a model that stops, resumed to the bit, with adapters and a quantized base."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import sft
from tests.recipes.flags import call, loaded_dtype
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.text import read_chat_template
from zoo.text.chat.template import PLAIN_TEMPLATE
from zoo.text.tasks.docstrings import read_docstrings

pytestmark = pytest.mark.ci

TINY = {"seq_len": 96, "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 2, "data_processes": 1}
ADAPTED = {"lora": 2, "targets": ("query", "value"), "microbatches": 2, "fsdp": 2, "tensor": 2, "epochs": 0.6}


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """A file of 200 chats, two of them too long for a row."""
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    with path.open("w") as file:
        for number in range(200):
            question = f"{number} + 1?" if number % 100 else "why? " * 30
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": str(number + 1)}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


@pytest.fixture(scope="module")
def unbroken(chats, start, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(sft.main, checkpoint=start, data=(str(chats),), out=out, **TINY, **ADAPTED)
    return out


def test_sft_learns_exports_and_reports(unbroken, start):
    lines = train.read_metrics(unbroken / "metrics.jsonl")
    assert [line["step"] for line in lines if "validation" in line] == [2, 4, 6]
    assert lines[-1]["loss"] < lines[0]["loss"]
    base, merged = zoo.load(start), zoo.load(unbroken / "export")
    tuned = zoo.adapters.load(base, unbroken / "adapter")
    tokens = jnp.arange(32).reshape(2, 16)
    np.testing.assert_allclose(tuned(tokens), merged(tokens), atol=1e-4)
    check_optimization(unbroken)
    report = (unbroken / "report.html").read_text()
    for part in ("nats per trained token", "→", " + 1?\n</b>", "<small>before</small>", "query.lora.down.weight"):
        assert part in report
    assert "bits per byte" not in report and "What does `json.dumps` do?" not in report
    counts = json.loads((unbroken / "config.json").read_text())["records"]
    assert lines[-1]["step"] == np.ceil(ADAPTED["epochs"] * counts["rows"] / TINY["batch_size"])
    assert counts["records"] == 200 and counts["dropped"] == 2 and counts["rejected"] == 0


def test_what_sft_leaves_stops_where_an_answer_ends(unbroken):
    """In the model and in the adapter: the template, and the token that ends a turn."""
    for folder in ("export", "adapter"):
        assert (unbroken / folder / "chat_template.jinja").read_text() == PLAIN_TEMPLATE
        assert json.loads((unbroken / folder / "generation_config.json").read_text()) == {"eos_token_id": 0}
        assert read_chat_template(unbroken / folder).special_tokens["eos_token"] == "\0"


def test_sft_is_not_resumed_with_other_chats(chats, start, unbroken, tmp_path):
    out = shutil.copytree(unbroken, tmp_path / "run")
    other = chats.read_text().replace("2", "3")
    (tmp_path / "other.jsonl").write_text(other)
    with pytest.raises(ValueError, match="was trained on another text"):
        call(sft.main, checkpoint=start, data=(str(tmp_path / "other.jsonl"),), out=out, resume=True, **TINY, **ADAPTED)


@pytest.mark.usefixtures("without_samples")
def test_sft_of_all_parameters_on_the_default_chats(start, tmp_path, monkeypatch):
    """The standard library's docstrings, of which a few are taken here, and a checkpoint's own template."""
    few = read_docstrings()[:60]
    monkeypatch.setattr(sft, "read_docstrings", lambda: few)
    checkpoint = shutil.copytree(start, tmp_path / "start")
    turns = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{{ eos_token }}{% endfor %}"
    template = turns + "{{ 'a:' if add_generation_prompt }}"
    (checkpoint / "chat_template.jinja").write_text(template)
    call(sft.main, checkpoint=checkpoint, out=tmp_path / "run", **{**TINY, "seq_len": 256})
    lines = train.read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["validation"] < lines[1]["validation"]
    assert not (tmp_path / "run" / "adapter").exists()
    assert (tmp_path / "run" / "export" / "chat_template.jinja").read_text() == template


@pytest.mark.slow  # test_qlora_learns_exports_and_reports, on texts
@pytest.mark.usefixtures("without_samples")
def test_sft_on_a_quantized_base(chats, text, tmp_path):
    model = zoo.models.Transformer(vocab=256, embed=128, layers=1, heads=2, mlp=64, key=jax.random.key(0))
    base = train.export(model, train.load_text((text,)), tmp_path / "base", seq_len=16)
    options = {**TINY, "steps": 2, "lora": 2, "quantization": "nf4", "fsdp": 2}
    call(sft.main, checkpoint=base, data=(str(chats),), out=tmp_path / "run", **options)
    small = zoo.adapters.quantize(zoo.load(base), "nf4")
    tuned, merged = zoo.adapters.load(small, tmp_path / "run" / "adapter"), zoo.load(tmp_path / "run" / "export")
    tokens = jnp.arange(32).reshape(2, 16)
    np.testing.assert_allclose(tuned(tokens), merged(tokens), atol=1e-4)


def test_sft_holds_a_frozen_base_in_the_compute_dtype(chats, start, tmp_path, monkeypatch):
    flags = {**TINY, "checkpoint": start, "data": (str(chats),), "out": tmp_path, "dtype": "bfloat16"}
    for lora, quantization, dtype in ((2, "none", "bfloat16"), (2, "nf4", "float32"), (0, "none", "float32")):
        assert loaded_dtype(sft.main, monkeypatch, **flags, lora=lora, quantization=quantization) == dtype


def complaint(capsys, *words):
    """Return the line that a command ends with."""
    with pytest.raises(SystemExit) as stopped:
        train.run_cli(sft.main, sft.Config, arguments=[str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_sft_bad_input_is_one_message(chats, start, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "runs/transformer/export: no model there; `python recipes/transformer.py`" in complaint(capsys)
    given = ("--checkpoint", start, "--data", chats)
    assert "add --lora 16 to train adapters" in complaint(capsys, *given, "--quantization", "nf4")
    assert "`train.load_text` reads texts" in complaint(capsys, "--checkpoint", start, "--data", text)
    (tmp_path / "bad.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "bad.jsonl:1: a conversation to train on" in complaint(capsys, *given[:2], "--data", "bad.jsonl")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    error = complaint(capsys, *given[:2], "--data", "pairs.jsonl")
    assert "is preference, expected one of text, chat, completion: `zoo fork dpo`" in error
    weighted = ("--checkpoint", start, "--data", f"{chats}=0.5", "bad.jsonl")
    assert "give each source a weight, PATH=WEIGHT, or none" in complaint(capsys, *weighted)
    assert "the train split has no rows" in complaint(capsys, *given, "--seq-len", 8)
    assert not (tmp_path / "runs").exists()
