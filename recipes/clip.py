"""Align digits with their words, as CLIP does: 600 steps, a minute on two cores, 97 to 99% of held-out right.

    python recipes/clip.py                                # 1,413 images of 8 x 8 pixels, and the bytes of ten words
    python recipes/clip.py --fsdp 2 --tensor 2 --dtype bfloat16

No class is in the model or in its loss (arXiv:2103.00020): a held-out digit is right if its word is the nearest of ten.
The loss ends near 1.9, not at 0: of 64 images in a batch six have the same word, and any of them is as good.
Needs `pip install 'equizoo[train,images]'`. A run's directory holds its metrics, checkpoints, report.html with digits
and the words nearest to them, and export/, a Hugging Face directory that CLIPModel reads.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import zoo
from zoo import tools, train
from zoo.train.digits import load_digits

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LENGTH, END = 8, 0


@dataclass(frozen=True)
class Config(train.TrainConfig):  # batch_size, steps, learning_rate, ..., mesh
    """Train on pairs of images and words, retrieve words of held-out images, export."""

    patch_size: int = 2  # Height and width of a patch, in pixels.
    features: int = 32  # Size of an embedding.
    embed: int = 64  # Width of the residual stream of both towers.
    layers: int = 3  # Number of blocks of each tower.
    heads: int = 4  # Attention heads, embed / heads wide each.
    mlp_dim: int = 128  # Width of the MLPs.
    held_out: int = 384  # Images to evaluate on; a multiple of the batch size.
    batch_size: int = 64
    steps: int = 600
    learning_rate: float = 2e-3
    warmup_steps: int = 60
    run: train.RunOptions = train.RunOptions(Path("runs/clip"))


def spell():
    """Return the bytes of the ten words, each closed by the end token, which is the padding too."""
    return jnp.asarray([list(word.encode().ljust(LENGTH, bytes([END]))) for word in WORDS])


def pair(batch):
    return {"images": batch["images"], "tokens": spell()[batch["labels"]]}


def cut(batch, parts):
    """Cut a batch into batches as large as those of training: the loss grows with the rows that are told apart."""
    arrays = [np.split(x, parts) for x in batch.values()]
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*arrays, strict=True)]


def main(config: Config) -> None:
    mesh = config.mesh.make_mesh()
    model_key = jax.random.key(config.run.seed)

    images, test = load_digits(held_out=config.held_out, seed=config.run.seed)
    batches = train.ShuffledBatches(images, config.batch_size, seed=config.run.seed, mesh=mesh, digest=images.digest)
    own_rows = test.take_rows(zoo.parallel.reader(mesh))
    test_batch = zoo.place_batch(own_rows, mesh)
    test_pairs = [zoo.place_batch(rows, mesh) for rows in cut(own_rows, config.held_out // config.batch_size)]

    def make_model(key):
        model = zoo.models.CLIP(
            vocab=256,
            length=LENGTH,
            end_token=END,
            image_size=images.images.shape[2],
            patch_size=config.patch_size,
            channels=images.images.shape[1],
            features=config.features,
            embed=config.embed,
            layers=config.layers,
            heads=config.heads,
            mlp=config.mlp_dim,
            key=key,
        )
        return config.mesh.apply(model)

    model = zoo.init(make_model, model_key, mesh)

    schedule = train.warmup_cosine(config.learning_rate, config.warmup_steps, config.steps)
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch):
        return zoo.models.contrastive_loss(zoo.cast(model, config.mesh.dtype), batch)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)
    evaluate = eqx.filter_jit(lambda model, batch: zoo.value(loss_fn, mesh)(model, pair(batch)))

    @partial(zoo.spmd, mesh=mesh, out="batch classes")
    def compare(model, images):
        return jax.nn.softmax(zoo.cast(model, config.mesh.dtype)(spell(), images))

    @eqx.filter_jit(donate="all-except-first")
    def step(batch, model, opt_state):
        loss, grads = gradient(model, pair(batch))
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        return model, opt_state, {"loss": loss, "gradient_norm": optax.tree.norm(grads)}

    with train.Run(config, mesh=mesh, model=model) as run:
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            model, opt_state, metrics = step(batch, model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                right = compare(model, test_batch["images"]).argmax(-1) == test_batch["labels"]
                losses = [evaluate(model, batch) for batch in test_pairs]
                run.log(validation=sum(losses) / len(losses), accuracy=right.mean())
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    if run.stopped:
        return

    probabilities = multihost_utils.process_allgather(compare(model, test_batch["images"]), tiled=True)
    tools.report_run(
        run,
        "Two towers from scratch",
        model,
        headline={"held-out digits with the right word": f"{np.mean(probabilities.argmax(-1) == test.labels):.1%}"},
        curves={"loss": "training", "validation": "held out"},
        unit="nats",
        plots={"The hardest held-out digits": draw_hardest(test, probabilities)},
    )
    zoo.save(model, run.directory / "export")


def draw_hardest(test, probabilities):
    """Draw the digits whose words are the least likely, with the words that are nearest."""
    guesses = probabilities.argmax(-1)
    missed = guesses != test.labels
    of_label = np.take_along_axis(probabilities, test.labels[:, None], 1)[:, 0]
    hardest = of_label.argsort()[:48]
    captions = [WORDS[guess] for guess in guesses[hardest]]
    pixels = (test.images[hardest, 0] + 1) / 2
    return tools.report.ImageGrid(pixels, captions, missed[hardest], description="Digits with words")


if __name__ == "__main__":
    train.run_cli(main, Config)
