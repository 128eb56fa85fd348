"""Train a vision Transformer on scikit-learn's digits: 600 steps, a minute on two cores, 98 to 99% of held-out right.

    python recipes/vit.py                                 # 1,413 images of 8 x 8 pixels, in patches of 2 x 2
    python recipes/vit.py --resume                        # after Ctrl-C; on another mesh too
    python recipes/vit.py --fsdp 2 --tensor 2 --dtype bfloat16
    python recipes/vit.py --patch-size 4 --steps 2000 --out runs/vit-4

Needs `pip install 'equizoo[train,images]'`. A run's directory holds its configuration, metrics, checkpoints,
report.html with digits and predictions, and export/, a Hugging Face directory that ViTForImageClassification reads.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
from jax.experimental import multihost_utils

import zoo
from zoo import tools, train
from zoo.train.digits import load_digits

TITLE = "A vision Transformer from scratch"


@dataclass(frozen=True)
class Config:
    """Train on images, evaluate, show predictions, export."""

    patch_size: int = 2  # Height and width of a patch, in pixels.
    embed: int = 64  # Width of the residual stream.
    layers: int = 4  # Number of blocks.
    heads: int = 4  # Attention heads, embed / heads wide each.
    mlp_dim: int = 128  # Width of the MLP.
    dropout: float = 0.1  # Dropout rate after embedding, attention and MLP.
    held_out: int = 384  # Images to evaluate on; a multiple of the devices that share the batch.
    batch_size: int = 64  # Images per step, over all devices.
    steps: int = 600  # Optimizer steps.
    learning_rate: float = 2e-3  # Peak learning rate, after linear warmup; cosine decay to a tenth.
    warmup_steps: int = 60  # Steps of linear warmup, at most half of all.
    weight_decay: float = 0.1  # AdamW's, of matrices and embeddings.
    eval_every: int = 100  # Steps between evaluations, each with a checkpoint.
    mesh: train.MeshOptions = train.MeshOptions()
    run: train.RunOptions = train.RunOptions(Path("runs/vit"))


def main(config: Config) -> None:
    mesh = config.mesh.make_mesh()
    model_key, dropout_key = jax.random.split(jax.random.key(config.run.seed))

    images, test = load_digits(held_out=config.held_out, seed=config.run.seed)
    reader = zoo.parallel.reader(mesh)
    seed = config.run.seed
    batches = train.ShuffledBatches(images, config.batch_size, seed=seed, process=reader, digest=images.digest)
    test_batch = zoo.place_batch(test.take_rows(reader), mesh)

    def make_model(key):
        channels, height, width = images.images.shape[1:]
        model = zoo.models.VisionTransformer(
            image_size=(height, width),
            patch_size=config.patch_size,
            channels=channels,
            classes=images.classes,
            embed=config.embed,
            layers=config.layers,
            heads=config.heads,
            mlp=config.mlp_dim,
            dropout=config.dropout,
            key=key,
        )
        return config.mesh.apply(model)

    model = zoo.init(make_model, model_key, mesh)

    peak = config.learning_rate
    warmup = min(config.warmup_steps, config.steps // 2)
    schedule = optax.warmup_cosine_decay_schedule(0.0, peak, warmup, config.steps, peak / 10)
    schedule = jax.jit(schedule)  # the log asks for it in each step: one program instead of ten
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=config.weight_decay, mask=train.decay_mask)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    opt_state = zoo.place(optimizer.init(zoo.trainable(model)), mesh.optimizer)

    def loss_fn(model, batch, key=None):
        return zoo.models.classification_loss(zoo.cast(model, config.mesh.dtype), batch, key=key)

    gradient = zoo.value_and_grad(loss_fn, mesh, **config.mesh.accumulation)

    @partial(zoo.value, mesh=mesh, has_aux=True)
    def evaluate(model, batch):
        logits = zoo.cast(model, config.mesh.dtype)(batch["images"])
        losses = zoo.models.token_losses(logits, batch["labels"])
        is_right = logits.argmax(-1) == batch["labels"]
        return (losses.sum(), len(losses)), is_right.sum()

    @eqx.filter_jit(donate="all-except-first")
    def step(inputs, model, opt_state):
        batch, key = inputs
        loss, grads = gradient(model, batch, key=key)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        model = zoo.place(eqx.apply_updates(model, updates), mesh)
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
        return model, opt_state, metrics

    with train.Run(config.run, config=config) as run:
        run.print_line(f"{zoo.count(model):,} parameters on {mesh}; {len(images):,} images, {len(test)} held out")
        model, opt_state = run.restore((model, opt_state), batches)
        for batch in run.steps(batches, config.steps):
            batch = zoo.place_batch(batch, mesh)
            key = jax.random.fold_in(dropout_key, run.step)
            model, opt_state, metrics = step((batch, key), model, opt_state)
            run.log(**metrics, learning_rate=schedule(run.step - 1))
            if run.every(config.eval_every):
                loss, correct = evaluate(model, test_batch)
                run.log(validation=loss, accuracy=correct / config.held_out)
            if run.due(config.eval_every):
                run.save((model, opt_state), batches)
    if run.stopped:
        return

    zoo.save(model, config.run.out / "export", family="vit")
    probabilities = predict(model, test_batch["images"], mesh)
    if jax.process_index() == 0:
        report(config, model, mesh, test, probabilities)


def predict(model, images, mesh):
    """Return the probability of each class, in every process."""

    def get_probabilities(model, images):
        return jax.nn.softmax(model(images))

    probabilities = zoo.spmd(get_probabilities, mesh, out="batch classes")(model, images)
    return multihost_utils.process_allgather(probabilities, tiled=True)


def report(config, model, mesh, test, probabilities):
    """Write report.html, with the digits whose labels are the least likely."""
    guesses = probabilities.argmax(-1)
    missed = guesses != test.labels
    of_label = np.take_along_axis(probabilities, test.labels[:, None], 1)[:, 0]
    hardest = of_label.argsort()[:48]
    captions = [f"{guesses[i]}, not {test.labels[i]}" if missed[i] else f"{guesses[i]}" for i in hardest]
    pixels = (test.images[hardest, 0] + 1) / 2
    grid = tools.report.ImageGrid(pixels, captions, missed[hardest], description="Digits with predictions")
    summary = f"{np.mean(~missed):.1%} of {config.held_out} held-out digits right after {config.steps} steps on {mesh}"
    path = tools.report.write_report(
        config.run.out,
        title=TITLE,
        model=tools.report.describe_model(model),
        summary=summary,
        curves={"loss": "training", "validation": "held out"},
        unit="nats",
        plots={"The hardest held-out digits": grid},
        parameters=tools.report.tabulate_parameters(model, mesh),
    )
    print(f"\n{summary}\nwrote the report to {path}")


if __name__ == "__main__":
    train.run_cli(main, Config)
