"""A program of one or two processes on data 2 x fsdp 2: samples, packs and computes a loss, and prints what it got.

python tests/train/reinforcement/sampled_on_processes.py INDEX COUNT PORT
"""

import hashlib
import json
import sys
from functools import partial

import jax
import numpy as np

import zoo
from zoo import train


def main(index: int, count: int, port: int) -> None:
    if count > 1:
        jax.distributed.initialize(f"127.0.0.1:{port}", count, index)
    mesh = zoo.make_mesh(data=2, fsdp=2)
    make = partial(zoo.models.Transformer, vocab=64, embed=32, layers=2, heads=4, mlp=64)
    model = zoo.init(lambda key: make(key=key), jax.random.key(0), mesh)
    mask = np.arange(9) >= np.array([[5], [0], [8], [3]])
    tokens = np.random.default_rng(0).integers(1, 64, mask.shape) * mask
    prompts = {"tokens": tokens.astype(np.int32), "mask": mask}
    sampler = train.make_sampler(model, mesh, "float32")
    options = {"samples": 4, "max_new_tokens": 8, "stop_tokens": (3, 4, 5)}
    samples = train.sample_groups(sampler, prompts, mesh=mesh, key=jax.random.key(1), **options)
    rewards = (samples.tokens > 20).mean(axis=1).reshape(4, 4)
    advantages = train.objectives.group_advantages(rewards)
    batch, rollouts = train.pack_rollouts(prompts, samples, advantages, 16, process=zoo.parallel.reader(mesh))

    def loss_fn(model, batch, rollouts):
        log_probs = zoo.log_probs(model, batch)
        gap = (log_probs - rollouts.sampler) * batch["weights"]
        loss = train.objectives.per_row(-rollouts.advantages * log_probs, batch["weights"])
        return loss, rollouts.find_largest(gap, 16)

    gradient = zoo.value_and_grad(loss_fn, mesh, has_aux=True)
    (loss, largest), _ = gradient(model, *zoo.place_batch((batch, rollouts), mesh))
    digest = hashlib.sha256(samples.tokens.astype(np.int32).tobytes()).hexdigest()
    print(json.dumps([len(batch["tokens"]), digest, float(loss), float(np.max(largest))]), flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
