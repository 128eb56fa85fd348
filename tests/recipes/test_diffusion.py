"""The recipe as its users run it, its bound against a naive one over all masks, and its cache against no cache."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from recipes import diffusion
from tests.recipes.flags import call
from tests.recipes.optimization import check_optimization
from zoo import train
from zoo.layers import TokenInfo

pytestmark = pytest.mark.ci

TINY = {
    "embed": 16, "layers": 2, "heads": 2, "mlp_dim": 16, "seq_len": 32, "block": 4, "block_steps": 2, "draws": 2,
    "batch_size": 8, "steps": 4, "warmup_steps": 1, "eval_every": 2, "remat": "none",
}  # fmt: skip
MASK = 0
VOCAB = 11


@pytest.fixture(scope="module")
def model():
    return zoo.models.Transformer(
        vocab=VOCAB, embed=16, layers=2, heads=2, kv_heads=1, mlp=16, qk_norm=True, key=jax.random.key(0)
    )


@pytest.fixture(scope="module")
def passage():
    return jax.random.randint(jax.random.key(1), (9,), 1, VOCAB)


def read_block(model, tokens, start, block):
    """Return log probabilities of a block at `start`: causal before it, in both directions inside, by the definition of
    the mask, in one pass without a cache."""
    positions = jnp.arange(start + block)[None]
    lookahead = jnp.where(positions < start, 0, start + block - 1 - positions)
    hidden, _ = model.hidden(tokens[None, : start + block], TokenInfo(positions, lookahead=lookahead))
    return jax.nn.log_softmax(model.logits(hidden.x)[0, start:])


def repeat_text(text, rows):
    batch = {"tokens": text[:-1], "targets": text[1:], "weights": jnp.ones(len(text) - 1)}
    return jax.tree.map(lambda x: jnp.tile(x, (rows, 1)), batch)


def configure(model, block):
    return zoo.configure(model, attention=partial(diffusion.attend_in_blocks, block=block))


@pytest.mark.parametrize("block", [1, 4, 8])
def test_bound_equals_the_naive_one_over_all_masks(model, passage, block):
    length = len(passage) - 1
    read = jax.jit(partial(read_block, model), static_argnums=(1, 2))
    naive = {}  # the weighted loss of each block under each of its masks, and the probability of the mask
    for start in range(1, length + 1, block):
        for masked in itertools.product([False, True], repeat=block):
            if (count := sum(masked)) == 0:
                continue
            tokens = passage.at[start : start + block].set(
                jnp.where(jnp.array(masked), MASK, passage[start : start + block])
            )
            picked = read(tokens, start, block)[jnp.arange(block), passage[start : start + block]]
            loss = -(block / count) * float(picked @ jnp.array(masked, float))
            naive[start, masked] = (loss, 1 / block / math.comb(block, count))
    assert sum(chance for _, chance in naive.values()) == pytest.approx(length / block)
    expected = sum(loss * chance for loss, chance in naive.values()) / length

    rows = 4096
    batch = diffusion.mask_tokens(repeat_text(passage, rows), jax.random.key(2), block=block, mask_token=MASK)
    weights = jnp.where(batch["targets"] < 0, 0, batch["weights"])
    assert weights.sum(1) == pytest.approx(length, rel=1e-6)

    @jax.jit
    def measure(batch):
        return jax.lax.map(
            lambda row: zoo.cross_entropy(configure(model, block), jax.tree.map(lambda x: x[None], row))[0],
            batch,
            batch_size=512,
        )

    losses = np.asarray(measure(batch))
    is_masked = np.asarray(batch["targets"][:, -length:] >= 0)
    for row in range(64):  # row by row: the weighted loss of the masks that it has
        masks = {1 + i: tuple(is_masked[row, i : i + block].tolist()) for i in range(0, length, block)}
        assert losses[row] == pytest.approx(sum(naive[key][0] for key in masks.items()), rel=1e-5)
    counts = np.bincount(is_masked.reshape(-1, block).sum(1))
    assert counts[0] == 0 and np.ptp(counts[1:]) <= 1  # uniform, and spread evenly
    found = {(1 + i, tuple(mask[i : i + block].tolist())) for mask in is_masked for i in range(0, length, block)}
    assert found == set(naive)
    error = losses.std() / length / rows**0.5
    assert losses.mean() / length == pytest.approx(expected, abs=float(4 * error + 1e-6))
    assert error < 0.02 * expected


def test_blocks_of_one_token_are_an_autoregressive_model(model, passage):
    """The loss has no noise then, and is the product of the conditionals that a sampler reads token by token."""
    batch = diffusion.mask_tokens(repeat_text(passage, 2), jax.random.key(3), block=1, mask_token=MASK)
    total, count = zoo.cross_entropy(configure(model, 1), batch)
    conditionals = [read_block(model, passage.at[i].set(MASK), i, 1)[0, passage[i]] for i in range(1, len(passage))]
    assert total / count == pytest.approx(-np.mean(conditionals), rel=1e-5)
    assert count == 2 * (len(passage) - 1)


@pytest.mark.parametrize("block", [2, 8])
def test_fill_in_equals_the_sampler_without_a_cache(model, passage, block):
    prompt = jnp.stack([passage.at[3:].set(MASK), passage.at[4:].set(MASK)])
    keys = jax.random.split(jax.random.key(4), 2)
    steps = max(block // 2, 1)
    fill = partial(diffusion.fill_in, block=block, steps=steps, order="confidence", mask_token=MASK, temperature=0.0)
    rows, order = jax.jit(partial(fill, model))(prompt, keys)
    read = jax.jit(partial(read_block, model), static_argnums=(1, 2))
    for row, given in enumerate(prompt):
        tokens = given
        numbers = np.zeros(len(passage), int)
        for number, start in enumerate(range(1, len(passage), block)):
            for step in range(steps):
                log_probs = read(tokens, start, block).at[:, MASK].set(-jnp.inf)
                confidence = jax.nn.log_softmax(log_probs).max(-1)
                masked = [i for i in range(block) if tokens[start + i] == MASK]
                best = sorted(masked, key=lambda i: -confidence[i])[: math.ceil(len(masked) / (steps - step))]
                for i in best:
                    tokens = tokens.at[start + i].set(log_probs[i].argmax())
                    numbers[start + i] = number * steps + step + 1
        np.testing.assert_array_equal(rows[row], tokens)
        np.testing.assert_array_equal(order[row], numbers)
    assert (rows != MASK).all()


def test_samples_follow_the_temperature(model):
    """A block of one token is drawn from the probabilities of the model."""
    prompt = jnp.full((2000, 2), MASK).at[:, 0].set(5)
    keys = jax.random.split(jax.random.key(5), len(prompt))
    options = {"block": 1, "steps": 1, "order": "random", "mask_token": MASK, "temperature": 2.0}
    rows, _ = jax.jit(partial(diffusion.fill_in, model, **options))(prompt, keys)
    log_probs = read_block(model, prompt[0], 1, 1)[0].at[MASK].set(-jnp.inf)
    expected = np.asarray(jax.nn.softmax(log_probs / 2))
    found = np.bincount(rows[:, 1], minlength=VOCAB) / len(rows)
    assert np.abs(found - expected).max() < 0.04


def test_random_order_fills_as_many_tokens_in_each_step(model, passage):
    prompt = jnp.tile(passage, (8, 1)).at[:, 4:].set(MASK)
    keys = jax.random.split(jax.random.key(6), len(prompt))
    options = {"block": 8, "steps": 2, "order": "random", "mask_token": MASK, "temperature": 1.0}
    rows, numbers = jax.jit(partial(diffusion.fill_in, model, **options))(prompt, keys)
    np.testing.assert_array_equal(rows[:, :4], prompt[:, :4])
    np.testing.assert_array_equal(numbers[:, :4], 0)
    assert (rows != MASK).all()
    assert ((numbers == 1).sum(1) == 3).all() and ((numbers == 2).sum(1) == 2).all()  # of five tokens
    assert len({tuple(row) for row in numbers.tolist()}) > 4
    assert len({tuple(row) for row in rows.tolist()}) > 4


def test_runs_and_their_report(text, tmp_path):
    call(diffusion.main, data=(text,), out=tmp_path, tensor=2, **TINY)
    for name in diffusion.RUNS:
        lines = train.read_metrics(tmp_path / name / "metrics.jsonl")
        assert [line["step"] for line in lines if "validation" in line] == [2, 4]
        assert lines[-1]["bits_per_byte"] < lines[0]["bits_per_byte"]
        assert (lines[-1]["spread"] == 0) == (name == "autoregressive")
    check_optimization(tmp_path, *diffusion.RUNS)
    report = (tmp_path / "report.html").read_text()
    for words in ("upper bounds", "spread of draws", "█", "block, 4 of 16 steps: def main(", "masked, 16 of 16 steps"):
        assert words in report
    assert "http" not in report


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"block": 5}, "divisor of --seq-len"),
        ({"block": 0}, "divisor of --seq-len"),
        ({"block_steps": 5}, "from 1 to --block"),
        ({"block_steps": 0}, "from 1 to --block"),
        ({"context": 2}, "--context"),
        ({"pipe": 2}, "--pipe"),
        ({"attention": "grouped"}, "--attention"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, flags, message):
    with pytest.raises(ValueError, match=message):
        call(diffusion.main, out=tmp_path / "run", **TINY | flags)
    assert not (tmp_path / "run").exists()
