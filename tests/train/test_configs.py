"""Configurations to inherit from: their flags, the help of inherited fields, and the checkpoint to start from."""

import json
from dataclasses import dataclass
from pathlib import Path

import jax
import pytest

import zoo
from zoo import train


@dataclass(frozen=True)
class Config(train.TextConfig):
    """Train on text."""

    steps: int = 7
    embed: int = 128  # Width of the residual stream.
    run: train.RunOptions = train.RunOptions(Path("runs/mine"))


@dataclass(frozen=True)
class TunedConfig(train.FinetuneConfig):
    """Fine-tune."""

    seq_len: int = 16
    prompts: tuple[str, ...] = ("a",)
    """Questions to answer."""


def read_help(config, capsys):
    with pytest.raises(SystemExit):
        train.run_cli(lambda config: config, config, arguments=["--help"])
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_inherited_fields_keep_their_help_and_come_first(capsys):
    printed = read_help(Config, capsys)
    assert "--steps INT Optimizer steps. (default: 7)" in printed
    assert "--embed INT Width of the residual stream. (default: 128)" in printed
    assert "--out PATH" in printed and "(default: runs/mine)" in printed
    assert printed.index("--eval-every") < printed.index("--data") < printed.index("--embed") < printed.index("--fsdp")
    config = train.run_cli(lambda config: config, Config, arguments=["--steps", "3", "--fsdp", "2", "--lr", "0.5"])
    assert (config.steps, config.mesh.fsdp, config.learning_rate) == (3, 2, 0.5)


def test_a_field_with_help_of_its_own_shows_it(capsys):
    printed = read_help(TunedConfig, capsys)
    assert "Questions to answer. (default: a)" in printed and "--seq-len INT Tokens per row" in printed


def test_finetuning_loads_adapts_and_reads_records(tmp_path):
    mesh = zoo.make_mesh(devices=jax.devices()[:1])
    model = zoo.models.Transformer(vocab=256, embed=8, layers=1, heads=2, mlp=8, key=jax.random.key(0))
    corpus = train.load_text({f"{number}": f"{number} bottles" for number in range(40)}, cache=tmp_path / "c")
    directory = train.export(model, corpus, tmp_path / "m", seq_len=16)
    for lora, dtype in ((0, "float32"), (2, "bfloat16")):
        config = TunedConfig(lora=lora, targets=("query",), mesh=train.MeshOptions(dtype="bfloat16"))
        base = config.load_model(directory, mesh)
        assert base.embedding.weight.dtype == dtype
        adapted = config.add_adapters(base, mesh, key=jax.random.key(1))
        assert (adapted is base) == (lora == 0) and zoo.count(adapted) == (2 * 2 * 8 if lora else zoo.count(base))
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"{number} bottles"}) + "\n" for number in range(9)))
    records = train.RecordOptions(data_processes=1)
    in_memory = [{"text": f"default {number}"} for number in range(9)]
    for number, (source, words) in enumerate([(in_memory, b"default"), ([str(path)], b"bottle")]):
        cache = tmp_path / f"cache {number}"
        data = TunedConfig(records=records).load_records(directory, source, cache=cache)
        assert words in bytes(data.train.rows[0]["tokens"].tolist())


def test_start_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    start = Path("runs/a/export")
    with pytest.raises(FileNotFoundError, match="runs/a/export: no model there; `python recipes/a.py` makes one"):
        train.resolve_start(start, start, "python recipes/a.py")
    start.mkdir(parents=True)
    (start / "config.json").write_text("{}")
    assert train.resolve_start(start, start, "python recipes/a.py") == start
    with pytest.raises(ValueError, match="there is no directory runs/b/export") as caught:
        train.resolve_start(Path("runs/b/export"), start, "python recipes/a.py")
    assert "recipes/a.py" not in str(caught.value)


def test_a_quantized_base_wants_adapters():
    with pytest.raises(ValueError, match="--quantization nf4 freezes the base: add --lora 16"):
        TunedConfig(quantization="nf4").load_model(Path("nowhere"), zoo.make_mesh())
