"""FLOPs of a training step, by hand."""

import dataclasses
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo import train
from zoo.parallel.chips import CHIPS
from zoo.train.flops import count_step_flops, find_peak_flops

TOKENS = jnp.zeros((4, 16), jnp.int32)


def make(key, **options):
    return zoo.models.Transformer(vocab=32, embed=8, layers=4, heads=2, mlp=16, **options, key=key)


def test_flops_are_three_times_those_of_all_products():
    model = eqx.filter_eval_shape(make, jax.random.key(0))
    of_layer = 4 * 8 * 8 + 3 * 8 * 16 + 2 * 8 * 16  # projections, MLP, scores and sums of 16 keys
    expected = 3 * 2 * TOKENS.size * (4 * of_layer + 8 * 32)
    assert count_step_flops(model, TOKENS) == expected
    looped = eqx.filter_eval_shape(make, jax.random.key(0), order=2 * [0, 1, 2, 3])
    assert count_step_flops(looped, TOKENS) == expected + 3 * 2 * TOKENS.size * 4 * of_layer


def test_flops_on_a_mesh_and_with_adapters():
    model = make(jax.random.key(0))
    mesh = zoo.make_mesh(data=1, pipe=2, layout=zoo.Layout(rounds=2), devices=jax.devices()[:2])
    assert count_step_flops(zoo.place(model, mesh), TOKENS) == count_step_flops(model, TOKENS)
    adapted = eqx.filter_eval_shape(zoo.adapters.lora, model, rank=2, key=jax.random.key(1))
    assert count_step_flops(adapted, TOKENS) == 0
    assert count_step_flops({"a table": TOKENS}, TOKENS) == 0
    for implementation in ("cudnn", "splash"):  # which CPUs do not have
        assert count_step_flops(zoo.configure(model, attention=implementation), TOKENS) == 0


def test_peak_flops_are_of_all_devices_on_a_data_sheet():
    h100s = [SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3")] * 8
    assert find_peak_flops(h100s) == 8 * 989.5e12
    assert find_peak_flops(jax.devices()) == 0  # CPUs


def run_steps(out):
    """Train for four steps on two devices; return the records of timing.jsonl."""
    model = make(jax.random.key(0))
    mesh = zoo.make_mesh(devices=jax.devices()[:2])
    batches = train.ShuffledBatches(train.TokenWindows(np.zeros(200, np.uint8), 16), 4)
    with train.Run(out, config={}, mesh=mesh, model=model, fetch_every=2) as run:
        for _ in run.steps(batches, 4):
            run.log(loss=0.0)
    return train.read_metrics(out / "timing.jsonl")


def test_a_run_on_a_known_chip_shows_its_mfu(tmp_path, monkeypatch, capsys):
    assert all("mfu" not in line for line in run_steps(tmp_path / "cpu")) and "MFU" not in capsys.readouterr().out
    slow = dataclasses.replace(CHIPS["v5e"], flops={"bfloat16": 1e9})
    monkeypatch.setattr("zoo.train.flops.find_chip", lambda device: slow)
    first, *others = run_steps(tmp_path / "v5e")
    assert "mfu" not in first and others  # the first step compiles
    for line in others:
        assert line["mfu"] == pytest.approx(line["flops_per_second"] / 2e9)
    assert f"  {others[-1]['mfu']:.1%} MFU" in capsys.readouterr().out.splitlines()[-1]
