"""Sampled completions become rows for training; what does not fit is refused by name."""

import json
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import zoo
from tests.processes import ROOT, make_environment
from zoo import train
from zoo.train.reinforcement.grouped_samples import Samples

PROMPTS = {"tokens": np.array([[0, 0, 5, 6], [1, 2, 3, 4]]), "mask": np.array([[0, 0, 1, 1], [1, 1, 1, 1]], bool)}
NEW = np.array([[7, 8, 9], [7, 9, -1], [9, -1, -1], [8, 8, 8]])
LOG_PROBS = np.where(NEW >= 0, -0.5 * np.arange(1, 13).reshape(4, 3), 0).astype(np.float32)
ADVANTAGES = np.array([[1.0, -1.0], [0.5, -0.5]])
KEY = jax.random.key(0)


def test_rows_begin_with_the_prompt_and_end_with_the_text():
    batch, rollouts = train.pack_rollouts(PROMPTS, Samples(NEW, LOG_PROBS), ADVANTAGES, 6)
    np.testing.assert_array_equal(batch["tokens"][:3], [[5, 6, 7, 8, 0, 0], [5, 6, 7, 0, 0, 0], [1, 2, 3, 4, 0, 0]])
    np.testing.assert_array_equal(
        batch["targets"][:3], [[-1, 7, 8, 9, -1, -1], [-1, 7, 9, -1, -1, -1], [-1, -1, -1, 9, -1, -1]]
    )
    np.testing.assert_array_equal(batch["weights"], batch["targets"] >= 0)
    np.testing.assert_array_equal(batch["segment_ids"].sum(1), [4, 3, 4, 6])
    np.testing.assert_array_equal(batch["positions"][3], np.arange(6))
    expected = batch["weights"] * ADVANTAGES.reshape(4, 1)
    np.testing.assert_array_equal(rollouts.advantages, expected)
    for row in range(4):
        np.testing.assert_array_equal(rollouts.sampler[row][batch["targets"][row] >= 0], LOG_PROBS[row][NEW[row] >= 0])
    assert not np.any(rollouts.sampler[batch["weights"] == 0])
    assert rollouts.log_probs is None and rollouts.reference is None


def test_each_process_packs_its_rows():
    whole, rollouts = train.pack_rollouts(PROMPTS, Samples(NEW, LOG_PROBS), ADVANTAGES, 6)
    parts = [train.pack_rollouts(PROMPTS, Samples(NEW, LOG_PROBS), ADVANTAGES, 6, process=(i, 2)) for i in range(2)]
    for name, x in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[0][name] for part in parts]), x)
    for name in ("rows", "advantages", "sampler"):
        found = np.concatenate([getattr(part[1], name) for part in parts])
        np.testing.assert_array_equal(found, getattr(rollouts, name), err_msg=name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 5}, "row 3 has a prompt of 4 tokens and a completion of 3, and seq_len=5 .* seq_len=6 or more"),
        ({"advantages": ADVANTAGES[:1]}, r"2 prompts, 4 completions and advantages of shape \(1, 2\) do not fit"),
        ({"advantages": np.ones((2, 3))}, r"2 prompts, 4 completions and advantages of shape \(2, 3\) do not fit"),
        ({"advantages": np.array([[1, np.nan], [0, 0]])}, "the advantage of completion 1 is not finite"),
        ({"log_probs": np.full((4, 3), -np.inf, np.float32)}, "a log-probability of completion 0 is not finite"),
        ({"new": np.where(NEW == 9, -1, NEW)}, "completion 2 is empty, or has tokens after its end"),
        ({"new": np.array([[7, -1, 9], *NEW[1:].tolist()])}, "completion 0 is empty, or has tokens after its end"),
        ({"mask": PROMPTS["mask"][:, ::-1]}, "prompt 0 is empty, or padded on the right"),
        ({"mask": np.array([[1, 1, 1, 1], [0, 0, 0, 0]], bool)}, "prompt 1 is empty, or padded on the right"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, no_type_checks):
    values = {"seq_len": 6, "advantages": ADVANTAGES, "log_probs": LOG_PROBS, "new": NEW, "mask": PROMPTS["mask"]}
    values |= changes
    prompts = {"tokens": PROMPTS["tokens"], "mask": values["mask"]}
    with pytest.raises(ValueError, match=message):
        train.pack_rollouts(
            prompts, Samples(values["new"], values["log_probs"]), values["advantages"], values["seq_len"]
        )


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"data": 1, "fsdp": 2, "context": 2, "tensor": 2}, {"microbatches": 2}),
        pytest.param({"data": 2, "context": 4}, {}, marks=pytest.mark.ci),
    ],
    ids=["context and micro-batches", "context"],
)
def test_the_largest_of_each_row_on_meshes(sizes, options):
    """The sequence is sharded: numbers of targets are where the targets are, and a row's largest is over all shards."""
    batch, rollouts = train.pack_rollouts(PROMPTS, Samples(NEW, LOG_PROBS), ADVANTAGES, 8)
    mesh = zoo.make_mesh(**sizes)
    model = zoo.init(
        lambda key: zoo.models.Transformer(vocab=16, embed=8, layers=1, heads=2, mlp=8, key=key), KEY, mesh
    )

    def loss_fn(model, batch, rollouts):
        total, _ = zoo.cross_entropy(model, batch)
        gap = batch["weights"] * rollouts.sampler
        return (total, batch["weights"].sum()), (rollouts.find_largest(gap, 4), (gap * rollouts.advantages).sum())

    gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True, **options)
    (_, (largest, total)), _ = gradient(model, *zoo.place_batch((batch, rollouts), mesh))
    np.testing.assert_allclose(largest, np.abs(LOG_PROBS).max(axis=1), rtol=1e-6)
    np.testing.assert_allclose(total, (LOG_PROBS.sum(1) * ADVANTAGES.reshape(-1)).sum(), rtol=1e-6)


@pytest.mark.ci
def test_two_processes_sample_and_learn_as_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = [sys.executable, ROOT / "tests/train/reinforcement/sampled_on_processes.py"]
    options = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}

    def start(index, count):
        words = [*program, *map(str, (index, count, port))]
        return subprocess.Popen(words, env=make_environment(4 // count), **options)

    printed = [process.communicate(timeout=300)[0] for process in [start(0, 2), start(1, 2), start(0, 1)]]
    *both, alone = [json.loads(text.splitlines()[-1]) for text in printed]
    assert [rows for rows, *_ in both] == [8, 8] and alone[0] == 16
    for _, digest, loss, largest in both:
        assert digest == alone[1] and loss == pytest.approx(alone[2], rel=1e-5) and largest < 1e-5
