"""Fits of synthetic losses with known laws; the recipe end to end and resumed; a branch against a run of its own."""

import shutil

import equinox as eqx
import jax
import numpy as np
import optax
import pytest

import zoo
from recipes import scaling
from tests.recipes.flags import call
from zoo import train
from zoo.train.flops import count_step_flops

pytestmark = pytest.mark.ci

TINY = {
    "widths": (8, 16, 24, 32), "budgets": (6e7, 8e7, 10e7, 12e7), "layers": 1, "seq_len": 16, "batch_size": 4,
    "base_width": 16, "warmup_steps": 1, "eval_rows": 8, "draws": 20, "save_every": 16,
}  # fmt: skip
SIZES = np.array([11e3, 21e3, 35e3, 72e3, 123e3, 265e3])
BUDGETS = 2.0 ** np.arange(35, 40)
TRUE = {"a": 0.52, "alpha": 0.22, "E": 1.2}


def make_losses(noise=0.0, seed=0):
    """Return best sizes, best losses, and losses "budgets sizes" on parabolas around them."""
    log_best = TRUE["a"] * np.log(BUDGETS) - 2.5
    best = TRUE["E"] + 300 * BUDGETS ** -TRUE["alpha"]
    losses = best[:, None] + 0.1 * (np.log(SIZES) - log_best[:, None]) ** 2
    return np.exp(log_best), best, losses + np.random.default_rng(seed).normal(0, noise, losses.shape)


def test_fits_recover_known_laws():
    sizes, best, losses = make_losses()
    minima = scaling.find_minima(SIZES, losses, points=4)
    np.testing.assert_allclose(minima.sizes, sizes, rtol=1e-6)
    np.testing.assert_allclose(minima.losses, best, rtol=1e-9)
    assert minima.inside.all()
    laws = scaling.fit_laws(BUDGETS[:-1], scaling.Minima(*(x[:-1] for x in minima)), BUDGETS)
    assert laws.a == pytest.approx(0.52, abs=1e-6)
    assert laws.alpha == pytest.approx(0.22, rel=0.01)  # of a grid
    assert laws.E == pytest.approx(1.2, abs=0.02)
    assert laws.sizes[-1] == pytest.approx(sizes[-1], rel=1e-6)
    assert laws.losses[-1] == pytest.approx(best[-1], abs=1e-3)


@pytest.mark.parametrize("points", [4, 5, 6])
def test_minima_are_those_of_polyfit(points):
    """In the adjacent sizes with the lowest sum of losses, at the left, in the middle and at the right."""
    _, _, losses = make_losses(noise=0.01)
    minima = scaling.find_minima(SIZES, np.stack([losses, losses[::-1]]), points)
    starts = [min(range(7 - points), key=lambda start: row[start : start + points].sum()) for row in losses]
    assert len(set(starts)) == 7 - points
    for row, start, *found in zip(losses, starts, *(x[0] for x in minima), strict=True):
        x, y = np.log(SIZES[start : start + points]), row[start : start + points]
        coefficients, errors, *_ = np.polyfit(x, y, 2, full=True)
        (vertex,) = np.roots(np.polyder(coefficients))
        expected = np.exp(vertex), np.polyval(coefficients, vertex), True, errors[0]
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_array_equal(minima.sizes[1], minima.sizes[0][::-1])


def test_power_law_has_no_negative_limit():
    """Losses on a straight line of log C fit best with E far below 0; then E is 0, and A and alpha are log-linear."""
    losses = 3 - 0.2 * np.log(BUDGETS / BUDGETS[0])
    E, A, alpha = scaling.fit_power_law(BUDGETS, losses)
    slope, offset = np.polyfit(np.log(BUDGETS), np.log(losses), 1)
    assert E == 0
    assert alpha == pytest.approx(-slope, rel=0.05) and np.log(A) == pytest.approx(offset, rel=0.05)


@pytest.mark.parametrize(
    ("losses", "best"),
    [([1.0, 2.0, 3.5, 5.0, 7.0, 9.0], 0), ([9.0, 7.0, 5.0, 3.5, 2.0, 1.0], 5), ([1.1, 2.0, 2.5, 2.6, 2.0, 1.0], 5)],
)
def test_minimum_at_the_edge_is_the_best_measured_point(losses, best):
    minima = scaling.find_minima(SIZES, np.array(losses), points=6)
    assert minima[:3] == (pytest.approx(SIZES[best]), 1.0, False)


def redraw(losses, draws, seed):
    minima = scaling.find_minima(SIZES, losses, 4)
    return scaling.redraw_losses(losses, minima.errors, len(losses), draws, seed)


def test_intervals_cover_known_laws():
    """Each interval of 95% holds the true value in most of forty data sets, and is not wide enough for all others."""
    sizes, best, _ = make_losses()
    targets = np.array([*TRUE.values(), sizes[-1], best[-1]])
    covered = []
    widths = []
    for seed in range(40):
        _, _, losses = make_losses(noise=0.01, seed=seed)
        minima = scaling.find_minima(SIZES, redraw(losses[:-1], 200, seed), 4)
        draws = scaling.fit_laws(BUDGETS[:-1], minima, BUDGETS)
        found = np.stack([draws.a, draws.alpha, draws.E, draws.sizes[:, -1], draws.losses[:, -1]], axis=1)
        low, high = scaling.find_interval(found)
        covered.append((low <= targets) & (targets <= high))
        widths.append((high - low) / targets)
    assert (np.mean(covered, axis=0) >= 0.8).all()
    a, alpha, E, size, loss = np.median(widths, axis=0)
    assert 0.1 < a < 0.5 and 0.1 < size < 0.5 and 0.01 < loss < 0.1
    assert alpha > 0.4 and E > 0.3  # four budgets hardly tell one from the other


def test_prediction_covers_what_is_measured():
    """With noise on the held-out budget too; that noise widens the intervals beyond the fit's own."""
    config = scaling.Config(budgets=tuple(BUDGETS), draws=300)
    inside = []
    ratios = []
    for seed in range(40):
        _, _, losses = make_losses(noise=0.01, seed=seed)
        laws, draws, (*_, size, loss) = scaling.predict_last(config, SIZES, losses)
        assert size["measured"] == f"{scaling.find_minima(SIZES, losses, 4).sizes[-1]:.4g}"
        assert float(loss["value"]) == pytest.approx(laws.losses[-1], rel=1e-3)
        inside.append([size["inside"] == "yes", loss["inside"] == "yes"])
        low, high = np.log(scaling.find_interval(draws.sizes[:, -1]))
        ratios.append(np.log(float(size["high"]) / float(size["low"])) / (high - low))
    assert (np.mean(inside, axis=0) >= 0.8).all()
    assert 1.1 < np.median(ratios) < 1.6
    _, _, losses = make_losses()
    losses[-1] += 0.2
    *_, (*_, size, loss) = scaling.predict_last(config, SIZES, losses)
    assert size["inside"] == "yes" and loss["inside"] == "no"


def test_redrawn_losses_have_the_noise_of_the_residuals():
    """The normal noise of a data set is divided by a chi of its own: the tails are Student's t."""
    losses = np.zeros((5, 6))
    redrawn = scaling.redraw_losses(losses, np.array([3e-4, 5e-4]), 8, 20_000, seed=0)
    assert redrawn.shape == (20_000, 5, 6)
    low, high = scaling.find_interval(redrawn)
    np.testing.assert_allclose([low.mean(), high.mean()], [-0.01 * 2.306, 0.01 * 2.306], rtol=0.03)  # of t, 8 degrees
    _, _, exact = make_losses()
    assert np.ptp(redraw(exact, 10, seed=0), axis=0).max() < 1e-9


@pytest.fixture(scope="module")
def unbroken(text, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "run"
    call(scaling.main, out=out, data=(text,), **TINY)
    return out


def read_held_out(out, width):
    lines = train.read_metrics(out / f"width-{width}" / "metrics.jsonl")
    return {line["step"]: line["held_out"] for line in lines if "held_out" in line}


def count_steps(width):
    """Return the steps of each budget, from FLOPs that are counted here: matrices, scores and their sums, times 3."""
    per_token = 2 * (13 * width**2 + 256 * width) + 2 * 2 * 16 * width
    step_flops = 3 * per_token * 4 * 16
    sizes = {"vocab": 256, "embed": width, "layers": 1, "heads": 1, "mlp": 3 * width}
    model = eqx.filter_eval_shape(zoo.models.Transformer, **sizes, key=jax.random.key(0))
    assert count_step_flops(model, jax.ShapeDtypeStruct((4, 16), "int32")) == step_flops
    return [round(budget / step_flops) for budget in TINY["budgets"]]


def test_scaling_runs_and_their_report(unbroken):
    for width in TINY["widths"]:
        lines = train.read_metrics(unbroken / f"width-{width}" / "metrics.jsonl")
        steps = count_steps(width)
        starts = [total - max(round(0.2 * total), 1) for total in steps]
        assert [line["step"] for line in lines] == list(range(1, starts[-1] + 1))
        held_out = read_held_out(unbroken, width)
        assert list(held_out) == starts
        assert all(np.shape(losses) == (2,) and losses[0] != losses[1] for losses in held_out.values())
        rates = np.max([line["learning_rate"] for line in lines], axis=1)
        np.testing.assert_allclose(rates, [0.0] + [2.0**-7] * (len(lines) - 1))
    report = (unbroken / "report.html").read_text()
    for part in ("Loss against parameters at equal FLOPs", "tokens per parameter", "alpha of L*", "1.2e+08 FLOPs"):
        assert part in report
    assert "http" not in report


def test_scaling_branch_equals_a_run_of_its_own(unbroken, text):
    """Of one budget, one seed and one width, with the schedule of the whole run in the optimizer."""
    width, steps = 24, count_steps(24)[1]
    key = jax.random.key(1)

    def make(width):
        heads = width // 8
        return zoo.models.Transformer(
            vocab=256, embed=width, layers=1, heads=heads, mlp=3 * width, qk_norm=True, key=key
        )

    base = make(16)
    model = train.transfer_width(make(width), base)
    decay = max(round(0.2 * steps), 1)
    schedule = train.warmup_stable_decay(2.0**-7, 1, steps, decay)
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b2=0.95),
        train.scale_by_width(base),
        optax.add_decayed_weights(0.1, train.decay_mask),
        optax.scale_by_learning_rate(schedule),
    )
    opt_state = optimizer.init(zoo.trainable(model))

    def compute_loss(model, batch):
        total, count = zoo.cross_entropy(model, batch)
        return total / count

    @eqx.filter_jit
    def step(model, opt_state, batch):
        grads = eqx.filter_grad(compute_loss)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state, zoo.trainable(model))
        return eqx.apply_updates(model, updates), opt_state

    corpus = train.load_text((text,))
    batches = corpus.train.batches(16, 4, seed=0)
    for _ in range(steps):
        model, opt_state = step(model, opt_state, next(batches))
    batches.close()
    (held_out,) = corpus.validation.ordered(16, 8, limit=1)
    expected = compute_loss(model, held_out) / np.log(2)
    assert read_held_out(unbroken, width)[steps - decay][1] == pytest.approx(float(expected), abs=1e-4)


def test_scaling_resumed_equals_unbroken(unbroken, text, tmp_path, monkeypatch):
    """The first width was stopped before its last branch, and gets a budget more. The test ends after it: other widths
    would only be longer."""
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    expected = read_held_out(unbroken, 8)
    shutil.rmtree(out / "width-8" / "checkpoints" / str(max(expected)))

    def end(directory, branches):
        raise EOFError(directory.name)

    with monkeypatch.context() as patch, pytest.raises(EOFError, match="width-8"):
        patch.setattr(scaling, "read_losses", end)
        call(scaling.main, out=out, data=(text,), resume=True, **TINY | {"budgets": (*TINY["budgets"], 13e7)})
    *same, (step, added) = read_held_out(out, 8).items()
    assert dict(same) == expected
    assert step > max(expected) and len(added) == 2
    branches = dict.fromkeys(expected)
    assert scaling.read_losses(out / "width-8", branches) == list(expected.values())
    with pytest.raises(ValueError, match="width-8 has branches of other budgets"):
        scaling.read_losses(out / "width-8", branches | {1: None})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"widths": (8, 16, 24)}, "widths=.*: expected four or more numbers above 0 that increase"),
        ({"budgets": (8e7, 6e7, 10e7, 12e7)}, "budgets=.*: expected four or more"),
        ({"budgets": (-1.0, 6e7, 10e7, 12e7)}, "budgets=.*: expected four or more"),
        ({"budgets": (1e5, 6e7, 10e7, 12e7)}, "1 steps of warmup and 1 of decay do not fit into 0 steps"),
        ({"points": 3}, "points=3: expected at least 4 and at most all 4 widths"),
        ({"points": 5}, "points=5: expected at least 4 and at most all 4 widths"),
        ({"num_seeds": 0}, "a sweep wants learning rates above 0, and seeds"),
        ({"widths": (8, 16, 20, 24)}, "widths=.*20.*: expected multiples of head_dim=8"),
        ({"budgets": (80e6, 80.1e6, 100e6, 120e6)}, "two of them are the same number of steps"),
    ],
)
def test_scaling_bad_flags_raise_early(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        call(scaling.main, out=tmp_path / "run", **TINY | changes)
    assert not (tmp_path / "run").exists()
