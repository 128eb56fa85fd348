"""Plans: memory at rest equals that of the compiled program, and what does not fit is refused."""

import dataclasses
from functools import partial

import equinox as eqx
import jax
import pytest

import zoo
from zoo.inspect.collectives import Collective
from zoo.inspect.links import Transfer
from zoo.parallel.topology import parse_topology
from zoo.tools import plan as planning
from zoo.tools.plan.format import format_plan
from zoo.tools.plan.peak import Peak
from zoo.tools.plan.step import BudgetError
from zoo.tools.plan.traced import TracedProgram
from zoo.tools.plan.training import make_training_step
from zoo.tools.plan.work import DeviceWork


@pytest.mark.slow  # test_compiled.py compares arguments to the byte by default
def test_plan_equals_compiled_program():
    """Arguments to the byte."""
    make = partial(zoo.models.Transformer, vocab=64, embed=32, layers=2, heads=4, mlp=64)
    mesh = zoo.make_mesh(data=2, fsdp=2, tensor=2)
    step, args = make_training_step(make, mesh, planning.TrainingOptions(8, 16, dtype="float32", remat="none"))
    plan = zoo.plan(step, *args, on="h100:8")
    program = zoo.inspect.compiled(step, *args)
    assert program.memory is not None and sum(plan.program.arguments.values()) == program.memory.arguments
    assert plan.fits and 0 < plan.lower_bound <= plan.sequential
    with pytest.raises(ValueError, match="mesh of 8 devices, .* and h100:2x8 has 16"):
        zoo.plan(step, *args, on="h100:2x8")


def test_plan_of_a_model_that_is_too_large():
    make = partial(zoo.models.preset, "llama3-8b", num_hidden_layers=2)
    topology = parse_topology("v5e:1x1")
    plan = planning.plan_training(make, {}, topology, planning.TrainingOptions(1, 128), model_flops=1)
    assert not plan.fits
    with pytest.raises(BudgetError, match="at the peak, and v5e has 16 GB"):
        plan.require_fit()


def test_screen_says_for_which_step_it_is_and_how_fast():
    """Two micro-batches on a network: the norm's and loss's collectives are small, and one line."""
    make = partial(zoo.models.Transformer, vocab=64, embed=32, layers=2, heads=4, mlp=64)
    options = planning.TrainingOptions(8, 16, remat="dots", microbatches=2)
    plan = planning.plan_training(make, {"data": 2, "fsdp": 2}, parse_topology("h100:2x2"), options, model_flops=10**9)
    lines = plan_lines(plan)
    first = " ".join(" ".join(lines[:2]).split())  # it goes on in a second line
    assert first.endswith("4 devices, 8 rows of 16 tokens, 2 micro-batches, remat dots, bfloat16")
    assert lines[-1].startswith("tokens      at most ") and lines[-1].endswith("/s in turns")

    small = [x for x in plan.transfers if x.seconds < 1e-6]
    (line,) = [line for line in lines if "below 1 us" in line]
    assert small and int(line.split("us")[1].split()[0]) == sum(x.collective.count for x in small)
    first, end = (next(n for n, line in enumerate(lines) if line.startswith(x)) for x in ("collectives", "seconds"))
    assert end - first - 1 == len(plan.transfers) - len(small) + 1

    tokens = 8 * 16 / plan.lower_bound * 86_400
    days = {"lower_bound": pytest.approx(1), "sequential": pytest.approx(plan.sequential / plan.lower_bound)}
    assert plan.count_days(tokens) == days
    assert "tokens take at least 1 days; " in plan_lines(plan, tokens=1.0001 * tokens)[-1]
    assert "tokens take at least 2.4 hours; " in plan_lines(plan, tokens=tokens / 10)[-1]


def test_times_of_a_step_by_hand():
    """The lower bound is the slowest resource at its data sheet's rate; in turns is the sum, at measured products."""
    flops = {"bfloat16": 10**15, "float32": 10**12}
    work = DeviceWork(flops, product_bytes=5 * 10**11, collectives=())
    program = TracedProgram("step", {"data": 2}, {"model": 10**9, "batch": 10**6}, 0, Peak(()), work)
    chip = planning.CHIPS["h100"]
    gather = Collective("all-gather", ("data",), "", 1, 1, 9 * 10**10)
    transfers = (Transfer(gather, 9e10, crosses=False, seconds=0.2), Transfer(gather, 1e10, crosses=True, seconds=0.3))
    plan = planning.Plan(parse_topology("h100:2"), chip, program, transfers)
    products = 1e15 / 989.5e12 + 1e12 / 494.5e12
    memory = (5e11 + 2 * 1.001e9) / 3350e9
    expected = {"products": products, "memory": memory, "links": 0.2, "network": 0.3}
    assert plan.seconds == pytest.approx(expected)
    assert plan.lower_bound == pytest.approx(products)
    assert plan.sequential == pytest.approx(1e15 / 645e12 + 1e12 / 494.5e12 + memory + 0.5)
    assert dataclasses.replace(plan, rewritten=0).seconds["memory"] == pytest.approx(5e11 / 3350e9)
    assert "products 1.55 at the measured 645 TFLOP/s in bfloat16" in str(plan)
    unmeasured = dataclasses.replace(plan, chip=dataclasses.replace(chip, measured={}))
    assert unmeasured.sequential == pytest.approx(products + memory + 0.5)
    assert "no product was measured on h100: both times are at data-sheet rates" in str(unmeasured)


@pytest.mark.parametrize(
    ("memory", "verdict"), [(2, "fits"), (1.2, "fits, with less than 30% to spare"), (0.9, "DOES NOT FIT")]
)
def test_screen_says_how_surely_a_step_fits(memory, verdict):
    make = partial(zoo.models.Transformer, vocab=64, embed=32, layers=1, heads=4, mlp=64)
    plan = planning.plan_training(make, {}, parse_topology("h100:1"), planning.TrainingOptions(1, 16), model_flops=1)
    chip = dataclasses.replace(plan.chip, memory=round(memory * plan.peak))
    (line,) = [line for line in plan_lines(dataclasses.replace(plan, chip=chip)) if line.startswith("memory")]
    assert line.startswith("memory      about ") and line.endswith(f": {verdict}")


def plan_lines(plan, **options):
    return format_plan(plan, **options).splitlines()


def test_plan_of_a_decoding_step_counts_its_cache():
    """One token for two rows, with a cache of 32 tokens."""
    make = partial(zoo.models.Transformer, vocab=64, embed=32, layers=2, heads=4, mlp=64)
    mesh = zoo.make_mesh(data=1, devices=jax.devices("cpu")[:1])
    model = zoo.place(eqx.filter_eval_shape(lambda key: make(key=key), jax.random.key(0)), mesh)
    states = eqx.filter_eval_shape(lambda model: model.init_state(2, 32), model)
    tokens = zoo.place_batch({"tokens": jax.ShapeDtypeStruct((2, 1), "int32")}, mesh)

    @eqx.filter_jit(donate="all-except-first")
    def decode(model, states, batch):
        hidden, states = model.hidden(batch["tokens"], zoo.layers.TokenInfo(batch["tokens"]), states)
        return model.logits(hidden.x), states

    plan = zoo.plan(decode, model, zoo.place(states, mesh), tokens, on="h100:1")
    assert plan.options is None and plan.tokens_per_second is None and plan.count_days(1e12) is None
    assert "zoo.inspect.compiled asks the compiler" in str(plan) and "in turns\n" not in str(plan)
    assert plan.memory["cache"] == sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(states))
    assert sum(plan.memory.values()) == plan.peak
    with pytest.raises(ValueError, match="mesh of 1 device, one device, and h100:2x8 has 16"):
        zoo.plan(decode, model, zoo.place(states, mesh), tokens, on="h100:2x8")


def test_plan_names_logits_and_the_largest_arrays():
    """A vocabulary of 2,048 over few and narrow layers: the peak is in the loss, in all logits of 2 x 1,024 tokens."""
    make = partial(zoo.models.Transformer, vocab=2048, embed=16, layers=1, heads=1, mlp=16)
    plan = planning.plan_training(make, {}, parse_topology("h100:1"), planning.TrainingOptions(2, 1024), model_flops=1)
    assert plan.fits and 0 < plan.lower_bound <= plan.sequential
    chunk = 2 * 1024 * 2048
    assert chunk * 4 <= plan.memory["logits"] <= chunk * 13 + 2048 * 8, "three arrays in float32, which are targets"
    name, size = plan.list_largest(1)[0]
    assert "logits" in name and "[2048,2048]" in name and size >= chunk * 2
