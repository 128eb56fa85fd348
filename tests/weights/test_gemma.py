"""Gemma's own JAX trees: logits of the einsums that the tree is made for, and a round trip to the bit."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.weights import from_gemma, to_gemma

EMBED, MLP, HEADS, HEAD_DIM, VOCAB, LAYERS = 32, 48, 4, 16, 64, 3
GEMMA3 = {"sliding_window": 8, "query_pre_attn_scalar": HEAD_DIM, "rope_scaling": None}
GEMMA3 |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4}
CASES = {  # family: config, KV heads, is the gating einsum (2, mlp, embed)?
    "gemma": ({}, 1, False),
    "gemma2": ({"sliding_window": 8, "query_pre_attn_scalar": 24}, HEADS, True),
    "gemma3_text": ({**GEMMA3, "sliding_window_pattern": 3}, 2, True),
}


def make_config(family):
    return {"model_type": family, **CASES[family][0]}


def make_tree(family, dtype=np.float32):
    """A tree as the package's `init` makes it: nested, without the prefix of published files."""
    rng = np.random.default_rng(0)
    draw = lambda *shape: (0.2 * rng.normal(size=shape)).astype(dtype)
    norm = lambda size: {"scale": draw(size)}
    _, kv_heads, by_rows = CASES[family]
    tree = {"embedder": {"input_embedding": draw(VOCAB, EMBED)}, "final_norm": norm(EMBED)}
    for number in range(LAYERS):
        attention = {"attn_vec_einsum": {"w": draw(HEADS, HEAD_DIM, EMBED)}}
        if kv_heads == HEADS:
            attention["qkv_einsum"] = {"w": draw(3, HEADS, EMBED, HEAD_DIM)}
        else:
            attention["q_einsum"] = {"w": draw(HEADS, EMBED, HEAD_DIM)}
            attention["kv_einsum"] = {"w": draw(2, kv_heads, EMBED, HEAD_DIM)}
        if family == "gemma3_text":
            attention |= {"_query_norm": norm(HEAD_DIM), "_key_norm": norm(HEAD_DIM)}
        gating = draw(2, MLP, EMBED) if by_rows else draw(2, EMBED, MLP)
        layer = {"attn": attention, "mlp": {"gating_einsum": gating, "linear": draw(MLP, EMBED)}}
        layer |= {name: norm(EMBED) for name in ("pre_attention_norm", "pre_ffw_norm")}
        if family != "gemma":
            layer |= {name: norm(EMBED) for name in ("post_attention_norm", "post_ffw_norm")}
        tree[f"layer_{number}"] = layer
    return tree


def publish(tree):
    """The same arrays as in published files: names of modules with slashes, and parameters below them."""
    flat = {}
    for module, node in tree.items():
        if not module.startswith("layer_"):
            flat[f"transformer/{module}"] = node
            continue
        for part, inner in node.items():
            for name, leaf in inner.items():
                if part == "mlp":
                    flat[f"transformer/{module}/mlp/{name}"] = {"w": leaf}
                elif part == "attn":
                    flat[f"transformer/{module}/attn/{name}"] = leaf
                else:
                    flat[f"transformer/{module}/{part}"] = inner
    return flat


def compute_logits(tree, tokens, family):
    """Gemma's forward pass, written out with the einsums that the tree's shapes are for."""
    config, _, by_rows = CASES[family]

    def normalize(x, node):
        return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * (1 + node["scale"])

    def rotate(x, base):
        half = HEAD_DIM // 2
        angles = jnp.arange(x.shape[1])[:, None, None] / base ** (jnp.arange(half) / half)
        first, second = x[..., :half], x[..., half:]
        turned = first * jnp.cos(angles) - second * jnp.sin(angles), second * jnp.cos(angles) + first * jnp.sin(angles)
        return jnp.concatenate(turned, -1)

    def attend(x, node, is_local):
        if "qkv_einsum" in node:
            queries, keys, values = jnp.einsum("BTD,SNDH->SBTNH", x, node["qkv_einsum"]["w"])
        else:
            queries = jnp.einsum("BTD,NDH->BTNH", x, node["q_einsum"]["w"])
            keys, values = jnp.einsum("BSD,CKDH->CBSKH", x, node["kv_einsum"]["w"])
        if "_query_norm" in node:
            queries, keys = normalize(queries, node["_query_norm"]), normalize(keys, node["_key_norm"])
        base = 1e6 if family == "gemma3_text" and not is_local else 1e4
        scale = config.get("query_pre_attn_scalar", HEAD_DIM) ** -0.5
        groups = HEADS // keys.shape[2]
        scores = jnp.einsum("BTNH,BSNH->BTNS", rotate(queries, base) * scale, jnp.repeat(rotate(keys, base), groups, 2))
        if family == "gemma2":
            scores = 50.0 * jnp.tanh(scores / 50.0)
        query, key = jnp.arange(x.shape[1])[:, None], jnp.arange(x.shape[1])
        is_seen = query >= key
        if is_local:
            is_seen &= key > query - config["sliding_window"]
        probabilities = jax.nn.softmax(jnp.where(is_seen[:, None], scores, -2.4e38), -1)
        mixed = jnp.einsum("BTNS,BSNH->BTNH", probabilities, jnp.repeat(values, groups, 2))
        return jnp.einsum("BTNH,NHD->BTD", mixed, node["attn_vec_einsum"]["w"])

    def feed(x, node):
        gates = jnp.einsum("...F,NHF->...NH" if by_rows else "...F,NFH->...NH", x, node["gating_einsum"])
        return (jax.nn.gelu(gates[..., 0, :]) * gates[..., 1, :]) @ node["linear"]

    x = tree["embedder"]["input_embedding"][tokens] * EMBED**0.5
    for number in range(LAYERS):
        layer = tree[f"layer_{number}"]
        is_local = {"gemma": False, "gemma2": number % 2 == 0, "gemma3_text": number % 3 < 2}[family]
        after = lambda y, name, layer=layer: normalize(y, layer[name]) if name in layer else y
        x += after(attend(normalize(x, layer["pre_attention_norm"]), layer["attn"], is_local), "post_attention_norm")
        x += after(feed(normalize(x, layer["pre_ffw_norm"]), layer["mlp"]), "post_ffw_norm")
    logits = normalize(x, tree["final_norm"]) @ tree["embedder"]["input_embedding"].T
    return 30.0 * jnp.tanh(logits / 30.0) if family == "gemma2" else logits


@pytest.mark.parametrize("family", CASES)
def test_logits_are_those_of_the_package(family):
    tree = make_tree(family)
    tokens = np.random.default_rng(1).integers(0, VOCAB, (2, 20))
    wanted = jax.jit(compute_logits, static_argnums=2)(jax.tree.map(jnp.asarray, tree), tokens, family)
    model = from_gemma(tree, make_config(family))
    ours = eqx.filter_jit(model)(tokens)
    assert float(jnp.abs(ours - wanted).max() / jnp.abs(wanted).max()) <= 1e-6


@pytest.mark.parametrize("family", CASES)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.ci), "bfloat16"])
def test_round_trip_is_bitwise(family, dtype, tmp_path):
    tree = make_tree(family, jnp.dtype(dtype))
    published = publish(tree) | {"SigLiPFromPatches_0/head": {"kernel": np.ones(3)}}
    model = from_gemma(published, make_config(family))
    again = to_gemma(model, published)
    assert again.keys() == published.keys()
    assert jax.tree.all(jax.tree.map(lambda x, y: x.dtype == y.dtype and x.tobytes() == y.tobytes(), again, published))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    nested = to_gemma(model, shapes)  # the other layout of the same numbers
    assert jax.tree.all(jax.tree.map(lambda x, y: x.tobytes() == y.tobytes(), nested, tree))
    zoo.save(model, tmp_path)
    assert eqx.tree_equal(zoo.load(tmp_path).stack, model.stack)


def test_an_orbax_folder_is_read(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    tree = publish(make_tree("gemma", jnp.bfloat16))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "gemma", jax.tree.map(jnp.asarray, tree))
    model = from_gemma(tmp_path / "gemma", {"model_type": "gemma"}, dtype="float32")
    assert model.embedding.weight.dtype == jnp.float32
    assert (np.asarray(model.embedding.weight) == tree["transformer/embedder"]["input_embedding"]).all()
    assert eqx.tree_equal(model, from_gemma(tree, {"model_type": "gemma"}, dtype="float32"))


def test_errors_say_what_would_do():
    tree = make_tree("gemma3_text")
    config = make_config("gemma3_text")
    with pytest.raises(zoo.CheckpointError, match="lacks sliding_window and rope_scaling, which may be None, and que"):
        from_gemma(tree, {"model_type": "gemma3_text"})
    with pytest.raises(zoo.CheckpointError, match="read and written as gemma, gemma2, gemma3_text, not as llama"):
        from_gemma(tree, {"model_type": "llama"})
    with pytest.raises(zoo.CheckpointError, match=r"layer_0/extra \[2\] has no place in gemma3_text"):
        from_gemma({**tree, "layer_0": {**tree["layer_0"], "extra": np.ones(2)}}, config)
    with pytest.raises(zoo.CheckpointError, match="_query_norm/scale .* has no place in gemma2"):
        from_gemma(tree, {"model_type": "gemma2", "query_pre_attn_scalar": 16})
    with pytest.raises(zoo.CheckpointError, match=r"o_proj.weight \[32, 64\] is missing"):
        from_gemma({**tree, "layer_1": {"attn": {}}}, config)
    with pytest.raises(zoo.CheckpointError, match="is not Gemma's.* lacks layer_0/attn/attn_vec_einsum/w"):
        from_gemma({"embedder": tree["embedder"], "stacked_layers": {"attn": np.ones(2)}}, config)
    with pytest.raises(
        zoo.CheckpointError, match="embed_tokens.weight is .64, 32. in the file, and the config asks for"
    ):
        from_gemma(tree, {**config, "vocab_size": 65})
    for array, dims in ((np.ones((3, 2, 32, 16)), "2 kv_heads embed head_dim"), (np.ones(3), "2 kv_heads embed")):
        attention = {**tree["layer_1"]["attn"], "kv_einsum": {"w": array}}
        with pytest.raises(zoo.CheckpointError, match=rf"layer_1/attn/kv_einsum/w is \[3.*: expected {dims}"):
            from_gemma({**tree, "layer_1": {**tree["layer_1"], "attn": attention}}, config)
    model = from_gemma(tree, config)
    with pytest.raises(zoo.CheckpointError, match=r"layer_3/attn.* asks for model.layers.3.*not in the model"):
        to_gemma(model, {**tree, "layer_3": tree["layer_0"]})
    with pytest.raises(zoo.CheckpointError, match="the tree has no place for model.layers.2.*: 13 in all"):
        to_gemma(model, {name: node for name, node in tree.items() if name != "layer_2"})
    with pytest.raises(zoo.CheckpointError, match="written as gemma, gemma2, gemma3_text, not as"):
        to_gemma(zoo.models.Transformer(vocab=8, embed=8, layers=1, heads=2, mlp=8, key=jax.random.key(0)), tree)


def test_a_gating_einsum_that_fits_both_orders_has_to_be_named():
    tree = make_tree("gemma3_text")
    for number in range(LAYERS):
        mlp = tree[f"layer_{number}"]["mlp"]
        mlp["gating_einsum"] = mlp["gating_einsum"][:, :EMBED]
        mlp["linear"] = mlp["linear"][:EMBED]
    config = make_config("gemma3_text")
    with pytest.raises(ValueError, match="fits both orders: pass gating='mlp embed' or 'embed mlp'"):
        from_gemma(tree, config)
    by_rows, by_columns = (from_gemma(tree, config, gating=gating) for gating in ("mlp embed", "embed mlp"))
    gate = lambda model: model.stack.segments[0].blocks[0].ffn.gate.weight
    np.testing.assert_array_equal(gate(by_rows)[0], gate(by_columns)[0].T)
    again = to_gemma(by_columns, tree, gating="embed mlp")
    np.testing.assert_array_equal(again["layer_0"]["mlp"]["gating_einsum"], tree["layer_0"]["mlp"]["gating_einsum"])
    with pytest.raises(ValueError, match="gating is 'rows': expected 'mlp embed' or 'embed mlp'"):
        from_gemma(tree, config, gating="rows")
