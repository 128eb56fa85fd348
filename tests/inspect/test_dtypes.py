"""Dtypes of products and sums: those of a bfloat16 step, and a planted sum in bfloat16 with its place."""

import equinox as eqx
import jax
import jax.numpy as jnp

import zoo
from zoo.inspect import audit_dtypes, count_flops


def make_step(dtype, mesh):
    return eqx.filter_jit(
        lambda model, batch: zoo.value_and_grad(lambda m, b: zoo.cross_entropy(zoo.cast(m, dtype), b), mesh)(
            model, batch
        )
    )


def make_problem(mesh, **options):
    sizes = {"vocab": 32, "embed": 16, "layers": 2, "heads": 2, "mlp": 16}
    model = zoo.models.Transformer(**sizes, **options, key=jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(1), (8, 9), 0, 32)
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
    return zoo.place(model, mesh), zoo.place_batch(batch, mesh)


def test_bfloat16_step_multiplies_in_it_and_sums_in_float32():
    mesh = zoo.make_mesh(data=4, fsdp=2, devices=jax.devices()[:8])
    model, batch = make_problem(mesh)
    step = make_step("bfloat16", mesh)
    audit = audit_dtypes(step, model, batch)
    assert audit.share("bfloat16 x bfloat16") == 1
    assert {group.result for group in audit.groups if group.kind == "product"} == {"float32"}
    assert audit.low_precision_sums == ()  # norms, softmax, loss, gradients over devices
    kinds = {(group.kind, group.result) for group in audit.groups}
    assert {("sum", "float32"), ("sum over devices", "float32")} <= kinds
    flops = sum(group.flops for group in audit.groups)
    assert flops == count_flops(eqx.filter_make_jaxpr(step)(model, batch)[0]).total
    assert audit_dtypes(make_step("float32", mesh), model, batch).share("float32 x float32") == 1


def test_sums_in_16_bits_are_found_with_their_scope():
    mesh = zoo.make_mesh(data=4, tensor=2, devices=jax.devices()[:8])
    audit = audit_dtypes(make_step("bfloat16", mesh), *make_problem(mesh))
    (group,) = audit.low_precision_sums  # tensor parallelism all-reduces activations as they are
    assert group.kind == "sum over devices" and any("GatedMLP/down" in scope for scope in group.scopes)

    @jax.jit
    def step(x):
        with jax.named_scope("planted"):
            return jax.lax.reduce_sum(x, axes=(0,)) + jnp.sum(x, dtype=jnp.float32).astype(x.dtype)

    audit = audit_dtypes(step, jnp.ones((8, 4), jnp.bfloat16))
    (group,) = audit.low_precision_sums
    assert (group.kind, group.operands, group.count) == ("sum", "bfloat16", 1) and "planted" in group.scopes[0]
    assert "sum in bfloat16: in planted" in str(audit)
