"""Direct preference optimization: from pairs to a model, with all parameters and with adapters."""

import json
import shutil
from dataclasses import replace

import jax
import numpy as np
import pytest

import zoo
from recipes import dpo
from tests.recipes.flags import call, loaded_dtype
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.text.tasks.docstrings import read_docstrings
from zoo.train import objectives
from zoo.train.stored_arrays import RowsWithArrays

pytestmark = pytest.mark.ci

TINY = {"seq_len": 96, "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 2, "data_processes": 1}
TINY |= {"learning_rate": 1e-2}
SHARDED = {"microbatches": 2, "fsdp": 2, "tensor": 2}
METRICS = ("loss", "accuracy", "margin", "chosen_reward", "rejected_reward", "gradient_norm")
HELD_OUT = ("validation", "validation_accuracy", "validation_margin", "validation_chosen_reward")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """A file of 200 pairs, two of them too long for a row."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    with path.open("w") as file:
        for number in range(200):
            question = f"{number} + 1?" if number % 100 else "why? " * 30
            texts = {"prompt": question, "chosen": str(number + 1), "rejected": "no"}
            messages = {name: [{"role": "assistant", "content": text}] for name, text in texts.items()}
            file.write(json.dumps(messages | {"prompt": [{"role": "user", "content": question}]}) + "\n")
    return path


@pytest.fixture(scope="module")
def unbroken(pairs, start, tmp_path_factory):
    """All parameters, with a precomputed reference, on data 2 x fsdp 2 x tensor 2."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(dpo.main, checkpoint=start, data=(str(pairs),), out=out, **TINY, **SHARDED)
    return out


def read(out):
    return train.read_metrics(out / "metrics.jsonl")


def test_dpo_learns_exports_and_reports(unbroken):
    lines = read(unbroken)
    assert [line["step"] for line in lines if "validation" in line] == [2, 4]
    assert all(set(METRICS) <= set(line) for line in lines) and set(HELD_OUT) <= set(lines[-1])
    first = lines[0]
    assert first["loss"] == pytest.approx(np.log(2), abs=1e-6)
    assert abs(first["margin"]) < 1e-5 and lines[-1]["loss"] < first["loss"]
    assert lines[-1]["margin"] == pytest.approx(lines[-1]["chosen_reward"] - lines[-1]["rejected_reward"], abs=1e-6)
    check_optimization(unbroken)
    report = (unbroken / "report.html").read_text()
    for part in ("per pair", "validation accuracy", "rejected reward", "→", " + 1?\n</b>"):
        assert part in report
    assert "What does `json.dumps` do?" not in report
    result = json.loads((unbroken / "results.json").read_text())["result"]
    assert "validation 0.693 → " in result and "validation_margin" in result and "per pair after 4 steps" in result
    counts = json.loads((unbroken / "config.json").read_text())["records"]
    assert counts["records"] == 200 and counts["dropped"] == 2


def test_dpo_is_not_resumed_from_another_model(pairs, unbroken, tmp_path, text):
    out = shutil.copytree(unbroken, tmp_path / "run")
    sizes = {"vocab": 256, "embed": 16, "layers": 2, "heads": 4, "mlp": 32, "qk_norm": True}
    model = zoo.models.Transformer(**sizes, key=jax.random.key(1))
    other = train.export(model, train.load_text((text,)), tmp_path / "other", seq_len=16)
    with pytest.raises(ValueError, match="was trained on top of other parameters"):
        call(dpo.main, checkpoint=other, data=(str(pairs),), out=out, resume=True, **TINY, **SHARDED)


@pytest.mark.slow  # the test below compares a mesh with one device
@pytest.mark.usefixtures("without_samples")
def test_dpo_is_the_same_on_one_device(pairs, start, unbroken, tmp_path, monkeypatch):
    monkeypatch.setattr(train.MeshOptions, "make_mesh", lambda self: zoo.make_mesh(devices=jax.devices()[:1]))
    call(dpo.main, checkpoint=start, data=(str(pairs),), out=tmp_path / "run", **TINY)
    for line, expected in zip(read(tmp_path / "run"), read(unbroken), strict=True):
        for name in {*METRICS, *HELD_OUT} & set(expected) - {"accuracy", "validation_accuracy"}:  # ties to rounding
            assert line[name] == pytest.approx(expected[name], rel=2e-3, abs=2e-5), name


@pytest.mark.usefixtures("without_samples")
def test_dpo_with_adapters_begins_at_its_reference(pairs, start, tmp_path, monkeypatch):
    """On sharded sequences as on one device."""
    options = {**TINY, "lora": 2, "targets": ("query", "value")}
    call(dpo.main, checkpoint=start, data=(str(pairs),), out=tmp_path / "mesh", context=2, microbatches=2, **options)
    monkeypatch.setattr(train.MeshOptions, "make_mesh", lambda self: zoo.make_mesh(devices=jax.devices()[:1]))
    call(dpo.main, checkpoint=start, data=(str(pairs),), out=tmp_path / "one", **options)
    mesh, one = read(tmp_path / "mesh"), read(tmp_path / "one")
    assert abs(one[0]["margin"]) < 1e-5 and abs(mesh[0]["margin"]) < 1e-5
    for line, expected in zip(mesh, one, strict=True):
        for name in {"loss", "margin", "validation", "gradient_norm"} & set(expected):
            assert line[name] == pytest.approx(expected[name], rel=2e-3, abs=2e-5), name
    assert mesh[-1]["validation"] != mesh[1]["validation"]
    tuned = zoo.adapters.load(zoo.load(start), tmp_path / "mesh" / "adapter")
    tokens = jax.numpy.arange(32).reshape(2, 16)
    np.testing.assert_allclose(tuned(tokens), zoo.load(tmp_path / "mesh" / "export")(tokens), atol=1e-4)


def add_zeros(model, data, mesh, **options):
    """Add a reference of 0 to each row, with which a log-ratio is log p."""
    splits = {}
    for name in ("train", "validation"):
        rows = getattr(data, name).rows
        reference = np.zeros((len(rows), len(rows[0]["tokens"])), np.float32)
        splits[name] = replace(getattr(data, name), rows=RowsWithArrays(rows, {"reference": reference}))
    return replace(data, **splits)


@pytest.mark.usefixtures("without_samples")
def test_a_pair_counts_the_same_in_any_row(pairs, start, tmp_path, monkeypatch):
    """Alone in a row, in a row with others, and as two rows of one text each; with SimPO in place of DPO."""
    simpo = lambda chosen, rejected, *, beta, label_smoothing: objectives.simpo(chosen, rejected, beta=beta)
    monkeypatch.setattr(dpo.objectives, "dpo", simpo)
    monkeypatch.setattr(train, "precompute_reference", add_zeros)
    monkeypatch.setattr(train, "sum_pairs", train.average_pairs)
    tokenizer, options = train.read_tokenizer(start), train.RecordOptions(kind="preference", data_processes=1)
    load = {"tokenizer": tokenizer, "template": options.read_template(start, tokenizer)}
    values = []
    for seq_len in (80, 320):
        shared = {**TINY, "seq_len": seq_len, "steps": 2, "learning_rate": 0.0, "beta": 2.0}
        call(dpo.main, checkpoint=start, data=(str(pairs),), out=tmp_path / f"{seq_len}", **shared)
        values.append(read(tmp_path / f"{seq_len}")[-1])
        rows = options.load([str(pairs)], seq_len=seq_len, **load).validation.rows
        assert (max(rows[n]["segment_ids"].max() for n in range(len(rows))) > 2) == (seq_len == 320)
    average = []
    for row in (rows[number] for number in range(len(rows))):
        for segment in range(1, row["segment_ids"].max() + 1):
            place = row["segment_ids"] == segment
            tokens = np.append(row["tokens"][place], row["targets"][place][-1])
            log_probs = zoo.score(zoo.load(start), jax.numpy.asarray(tokens)[None])[0]
            average.append((log_probs * row["weights"][place]).sum() / row["weights"][place].sum())
    margins = 2 * (np.array(average[0::2]) - np.array(average[1::2]))
    expected = {"validation": np.log1p(np.exp(1 - margins)).mean(), "validation_margin": margins.mean()}
    expected["validation_accuracy"] = (margins > 0).mean()
    for found in values:
        assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.usefixtures("without_samples")
def test_dpo_on_the_default_pairs(start, tmp_path, monkeypatch):
    few = read_docstrings()[:60]
    monkeypatch.setattr(dpo, "read_docstrings", lambda: few)
    call(dpo.main, checkpoint=start, out=tmp_path / "run", **{**TINY, "seq_len": 512, "epochs": 0.25})
    rows = json.loads((tmp_path / "run" / "config.json").read_text())["records"]["rows"]
    assert read(tmp_path / "run")[-1]["step"] == np.ceil(rows / 4 / TINY["batch_size"]) < TINY["steps"]
    assert (tmp_path / "run" / "export" / "chat_template.jinja").exists()
    assert "What does `random.shuffle` do?" in (tmp_path / "run" / "report.html").read_text()


def test_dpo_holds_a_frozen_base_in_the_compute_dtype(pairs, start, tmp_path, monkeypatch):
    flags = {**TINY, "checkpoint": start, "data": (str(pairs),), "out": tmp_path, "dtype": "bfloat16"}
    for lora, dtype in ((2, "bfloat16"), (0, "float32")):
        assert loaded_dtype(dpo.main, monkeypatch, **flags, lora=lora) == dtype


def complaint(capsys, *words):
    """Return the line that a command ends with."""
    with pytest.raises(SystemExit) as stopped:
        train.run_cli(dpo.main, dpo.Config, arguments=[str(word) for word in words])
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_dpo_bad_input_is_one_message(pairs, start, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "runs/sft/export: no model there; `python recipes/sft.py` makes one" in complaint(capsys)
    given = ("--checkpoint", start, "--data", pairs)
    assert "add --lora 16 to train adapters" in complaint(capsys, *given, "--quantization", "nf4")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    assert "`chosen` is missing" in complaint(capsys, *given[:2], "--data", "chats.jsonl")
    assert "the train split has no rows" in complaint(capsys, *given, "--seq-len", 8)
    assert not (tmp_path / "runs").exists()
