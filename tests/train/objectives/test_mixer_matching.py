"""Errors of mixers next to the attention of a teacher, on one device and on meshes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.layers.recurrent.from_attention import copy_to_gated_delta_net, copy_to_mamba2
from zoo.layers.token_info import batch_token_info, pack_positions
from zoo.parallel import SEQUENCE
from zoo.train import objectives

KEY = jax.random.key(0)


def compute_plainly(mixers, teacher, batch):
    """Run the teacher layer by layer, and each mixer on the input of its layer."""
    info = batch_token_info(batch)
    hidden = teacher.embed(batch["tokens"], info)
    errors, powers = [], []
    for layer, block in enumerate(teacher.stack.iter_blocks()):
        if layer in mixers:
            x = block.mixer_norm(hidden.x)
            expected, _ = block.mixer(x, info)
            y, _ = mixers[layer](x, info)
            errors.append(((y - expected) ** 2).mean(-1))
            powers.append((expected**2).mean(-1))
        hidden, _ = block(hidden, info)
    return jnp.stack(errors), jnp.stack(powers)


@pytest.fixture(scope="module")
def problem():
    """A teacher with two windows, mixers for two of its layers, and packed rows."""
    options = {"heads": 4, "kv_heads": 2, "mlp": 16, "windows": (4, None)}
    teacher = zoo.models.Transformer(vocab=32, embed=16, layers=3, **options, key=KEY)
    blocks = list(teacher.stack.iter_blocks())
    copies = {0: copy_to_gated_delta_net, 2: copy_to_mamba2}
    mixers = {layer: copy(blocks[layer].mixer, key=KEY) for layer, copy in copies.items()}
    tokens = jax.random.randint(KEY, (8, 17), 0, 32)
    segment_ids = jnp.broadcast_to(1 + jnp.arange(16) // 10, (8, 16))
    packed = {"segment_ids": segment_ids, "positions": pack_positions(segment_ids)}
    return mixers, teacher, {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **packed}


def loss_fn(mixers, batch, teacher):
    found = objectives.mixer_matching(mixers, teacher, batch)
    return (found.errors.sum(), batch["tokens"].size), (found.errors.sum((1, 2)), found.powers.sum((1, 2)))


@pytest.mark.one_case
@pytest.mark.parametrize(
    ("sizes", "layout"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, None),
        ({"fsdp": 4, "tensor": 2}, zoo.Layout().with_dims(tokens=SEQUENCE.axes("tokens"))),
        ({"data": 4, "context": 2}, None),
    ],
    ids=["fsdp and tensor", "sequence parallel", "context"],
)
def test_errors_and_gradients_equal_a_plain_loop(problem, sizes, layout):
    mixers, teacher, batch = problem
    mesh = zoo.make_mesh(**sizes, **({} if layout is None else {"layout": layout}))
    placed = zoo.place((mixers, teacher), mesh)
    run = zoo.value_and_grad(loss_fn, mesh, has_aux=True)
    (_, sums), grads = run(placed[0], zoo.place_batch(batch, mesh), placed[1])

    @jax.jit
    def run_plainly(mixers):
        errors, powers = compute_plainly(mixers, teacher, batch)
        return errors.sum() / batch["tokens"].size, (errors.sum((1, 2)), powers.sum((1, 2)))

    (_, expected_sums), expected = jax.value_and_grad(run_plainly, has_aux=True)(mixers)
    for actual, wanted in zip(sums, expected_sums, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-5)
    for actual, grad in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(actual, grad, atol=2e-5 * max(np.abs(grad).max(), 1e-2))


def test_errors_do_not_depend_on_padding(problem):
    """Positions of -1 are padding, also without segment ids. The second row is the text of the first, without padding,
    and four tokens behind it."""
    mixers, teacher, batch = problem
    tokens = batch["tokens"][:2].at[1, :12].set(batch["tokens"][0, 4:])
    positions = jnp.stack([jnp.maximum(jnp.arange(16) - 4, -1), jnp.arange(16)])
    padded = {"tokens": tokens, "targets": tokens, "positions": positions}
    found = eqx.filter_jit(objectives.mixer_matching)(mixers, teacher, padded)
    for values in found:
        np.testing.assert_allclose(values[:, 0, 4:], values[:, 1, :12], rtol=1e-4, atol=1e-6)


def test_a_layer_without_attention_is_refused(problem):
    mixers, teacher, batch = problem
    hybrid = zoo.models.replace_mixers(teacher, {0: mixers[0]})
    with pytest.raises(ValueError, match=r"layer 0 of the teacher has no Attention: its layers \[1, 2\] have"):
        objectives.mixer_matching(mixers, hybrid, batch)
