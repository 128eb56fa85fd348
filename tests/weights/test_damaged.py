"""Damaged checkpoints: one clear error each, before anything is allocated; what harms nothing changes no bit."""

import collections
import contextlib
import itertools
import json
import pickle
import shutil
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from zoo.weights.safetensors import DTYPES, open_safetensors

WHOLE, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
SECONDS, LONGEST = 20, 2000
QUERY = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"
LLAMA = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA |= {"num_key_value_heads": 1}
ONE_LAYER = {"num_hidden_layers": 1, "intermediate_size": 12}
GPT2 = {"vocab_size": 11, "n_embd": 8, "n_layer": 2, "n_head": 2, "n_positions": 6}


@pytest.fixture(scope="module")
def whole(make, tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    zoo.save(make("llama", LLAMA), path)
    return path


@pytest.fixture(scope="module")
def sharded(make, tmp_path_factory):
    path = tmp_path_factory.mktemp("sharded")
    zoo.save(make("llama", LLAMA), path, shard_bytes=1500)
    return path


@pytest.fixture(scope="module")
def bits(whole):
    return bits_of(zoo.load(whole))


@pytest.fixture
def allocations(monkeypatch):
    """How many arrays were filled so far."""
    filled, fill = [], jax.make_array_from_callback
    monkeypatch.setattr(jax, "make_array_from_callback", lambda *a, **k: filled.append(a[0]) or fill(*a, **k))
    return filled


@pytest.fixture
def attempt(allocations, bits):
    """`attempt(label, directory)` gives the message of the error that is expected of a load. It holds each error to
    what is promised of all of them: its kind, its length, when it comes."""

    def run(label, directory, *, allocates=False, **options):
        allocations.clear()
        with told(label), limited():
            message = refusal(lambda: zoo.load(directory, **options))
            assert message is not None, "it was loaded"
            assert allocates or not allocations, "arrays were filled before it was found"
        return message

    def harmless(label, directory):
        with told(label), limited():
            assert bits_of(zoo.load(directory)) == bits

    run.harmless = harmless
    return run


def refusal(run):
    """The message of the one error that a damaged checkpoint may give, None where there was none."""
    try:
        run()
    except zoo.CheckpointError as error:
        text = str(error)
        assert type(error) is zoo.CheckpointError and isinstance(error, ValueError)
        assert text.strip() and len(text) < LONGEST, f"{len(text)} characters: {text[:300]}"
        text.encode()  # it can be printed
        return text
    return None


@contextlib.contextmanager
def told(label):
    try:
        yield
    except BaseException as error:
        error.add_note(f"damage: {str(label)[:200]}")
        raise


@contextlib.contextmanager
def limited():
    def stop(*_):
        raise AssertionError(f"it takes longer than {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def bits_of(model):
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in jax.tree.leaves(model)]


def parsed(path):
    """The header of a file of safetensors as a table, and its data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def file_of(header, data, *, padding=b""):
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + padding
    return len(text).to_bytes(8, "little") + text + data


def altered(source, path, name, content):
    """A copy of a checkpoint with one file changed, or without it (None)."""
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(source, path)
    if content is None:
        (path / name).unlink()
    else:
        (path / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return path


def with_tensors(source, path, change):
    """A copy of a checkpoint whose tensors `change` has altered in a table of arrays, names and sizes consistent."""
    header, data = parsed(source / WHOLE)
    header.pop("__metadata__", None)
    arrays = {}
    for name, facts in header.items():
        start, stop = facts["data_offsets"]
        arrays[name] = np.frombuffer(data[start:stop], DTYPES[facts["dtype"]]).reshape(facts["shape"])
    change(arrays)
    codes, header, end = {dtype: code for code, dtype in DTYPES.items()}, {}, 0
    for name, array in arrays.items():
        start, end = end, end + array.nbytes
        header[name] = {"dtype": codes[array.dtype], "shape": list(array.shape), "data_offsets": [start, end]}
    return altered(source, path, WHOLE, file_of(header, b"".join(x.tobytes() for x in arrays.values())))


def test_files_cut_short_or_grown(whole, sharded, tmp_path, attempt):
    content = (whole / WHOLE).read_bytes()
    begins = 8 + int.from_bytes(content[:8], "little")
    points = {*range(12), *np.linspace(12, len(content) - 1, 40, dtype=int), begins - 1, begins, begins + 1}
    for point in sorted(map(int, points)):
        message = attempt(f"cut at {point}", altered(whole, tmp_path / "cut", WHOLE, content[:point]))
        assert WHOLE in message
    for more in (b"\0", b" " * 8, content):
        message = attempt(f"{len(more)} more", altered(whole, tmp_path / "grown", WHOLE, content + more))
        assert "longer than it says" in message
    for shard in sorted(path.name for path in sharded.glob("model-*")):
        content = (sharded / shard).read_bytes()
        for point in (0, 7, 8, 100, len(content) - 1):
            assert shard in attempt(
                f"{shard} cut at {point}", altered(sharded, tmp_path / "cut", shard, content[:point])
            )


def test_header_of_another_length(whole, tmp_path, attempt):
    content = (whole / WHOLE).read_bytes()
    right = int.from_bytes(content[:8], "little")
    wrong = {right + by for by in (-100, -8, -2, -1, 1, 2, 8, 100)}
    wrong |= {0, 1, 2, 3, len(content) - 8, len(content), 10**8, 10**8 + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1}
    for length in sorted(wrong - {right}):
        damaged = length.to_bytes(8, "little") + content[8:]
        assert WHOLE in attempt(f"length {length}", altered(whole, tmp_path / "length", WHOLE, damaged))


def test_flipped_bits_of_the_header(make, tmp_path, attempt):
    """One bit of every byte of length and header: an error that names the file, or a table that is another one, and
    then is refused as a whole; only bits of padding and metadata do nothing."""
    whole = tmp_path / "whole"
    zoo.save(make("llama", LLAMA | {"num_hidden_layers": 1}), whole)
    content = (whole / WHOLE).read_bytes()
    ends = 8 + int.from_bytes(content[:8], "little")
    table = lambda path: {name: (x.dtype, x.shape, x.read().tobytes()) for name, x in open_safetensors(path).items()}
    right = table(whole / WHOLE)
    path = tmp_path / WHOLE
    draw = np.random.default_rng(0)
    outcomes = collections.Counter()
    for place in range(ends):
        damaged = bytearray(content)
        bit = int(draw.integers(8))
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        label, found = f"bit {bit} of byte {place}", {}
        with told(label), limited():
            message = refusal(lambda found=found: found.update(table(path)))
        if message is not None:
            assert WHOLE in message
            outcomes["refused"] += 1
        elif found == right:
            outcomes["harmless"] += 1
        else:
            outcomes["another"] += 1
            if outcomes["another"] % 30 == 1:
                attempt(label, altered(whole, tmp_path / "flip", WHOLE, bytes(damaged)))
    assert outcomes["refused"] > outcomes["another"] > 100 > outcomes["harmless"] > 0


def test_several_bits_at_once(whole, tmp_path):
    """Bytes changed at random, anywhere before the data: refused, or read as a table that tiles the file."""
    content = (whole / WHOLE).read_bytes()
    ends = 8 + int.from_bytes(content[:8], "little")
    draw = np.random.default_rng(0)
    path = tmp_path / WHOLE
    for trial in range(1000):
        damaged = np.frombuffer(content, np.uint8).copy()
        places = draw.integers(8 if trial % 2 else 0, ends, draw.integers(1, 9))
        damaged[places] = (
            draw.integers(0, 256, len(places)) if trial % 3 else draw.choice(list(b'[]{}",:0123456789eE-.'))
        )
        path.write_bytes(damaged.tobytes())
        with told(f"trial {trial}"), limited():
            found = {}
            if refusal(lambda found=found: found.update(open_safetensors(path))) is None:
                assert sum(x.read().nbytes for x in found.values()) <= len(content) - ends


def headers():
    """(what was done to the header, the header, what the message must name)."""

    def change(**facts):
        return lambda header: header[QUERY].update(facts)

    def shifted(name, start, stop):
        def shift(header):
            offsets = header[name]["data_offsets"]
            header[name]["data_offsets"] = [offsets[0] + start, offsets[1] + stop]

        return shift

    def swapped(header):
        header[QUERY]["data_offsets"], header[NORM]["data_offsets"] = (
            header[NORM]["data_offsets"],
            header[QUERY]["data_offsets"],
        )

    for code in ("F64", "F16", "BF16", "I64", "I16", "U8", "F8_E4M3", "BOOL", "F31", "f32", "", None, 32, ["F32"], {}):
        yield f"dtype {code}", change(dtype=code), QUERY
    yield "a long dtype", change(dtype="F" * 10**5), WHOLE
    for shape in ([8], [8, 7], [9, 8], [8, 8, 2], [64, 0], [], [-8, -8], [8.0, 8], ["8", 8], [True, 64], [None], 64):
        yield f"shape {shape}", change(shape=shape), QUERY
    for shape in ("8", None, {}, [[8], 8], [2**62, 8], [2**61] * 2, [2**61] * 400, [1] * 10**4, [10**400, 8]):
        yield f"shape {str(shape)[:30]}", change(shape=shape), WHOLE
    for start, stop in (
        (1, 1),
        (-1, -1),
        (-4, 0),
        (0, 4),
        (4, 0),
        (0, -4),
        (10**9, 10**9),
        (2**62, 2**62),
        (0, 10**30),
    ):
        yield f"offsets {start} {stop}", shifted(QUERY, start, stop), WHOLE
    yield "offsets reversed", lambda header: header[QUERY]["data_offsets"].reverse(), QUERY
    for offsets in (
        [],
        [0],
        [0, 256, 512],
        [-256, 0],
        [0.0, 256.0],
        ["0", "256"],
        None,
        "0",
        {},
        [True, 257],
        [[], []],
    ):
        yield f"offsets {offsets}", change(data_offsets=offsets), QUERY
    yield "places of two tensors swapped", swapped, WHOLE
    yield "two tensors in one place", lambda header: header.update(twice=header[QUERY]), WHOLE
    yield "a hole", lambda header: header.pop(QUERY), WHOLE
    yield "no tensor at all", lambda header: header.clear(), WHOLE
    yield "one fact too many", change(strides=[8, 1]), QUERY
    for key in ("dtype", "shape", "data_offsets"):
        yield f"no {key}", lambda header, key=key: header[QUERY].pop(key), QUERY
    for facts in (None, 1, "F32", [], [1, 2, 3], {}):
        yield f"facts {facts}", lambda header, facts=facts: header.update({QUERY: facts}), QUERY


def test_headers_that_do_not_fit(whole, tmp_path, attempt):
    for label, change, named in headers():
        header, data = parsed(whole / WHOLE)
        change(header)
        assert named in attempt(label, altered(whole, tmp_path / "header", WHOLE, file_of(header, data)))
    _, data = parsed(whole / WHOLE)
    deep = 10 * sys.getrecursionlimit()
    entry = b'{"dtype":"F32","shape":[8],"data_offsets":[0,32]}'
    texts = {
        "nothing": b"",
        "spaces": b" " * 64,
        "a list": b"[]",
        "a word": b'"F32"',
        "null": b"null",
        "no JSON": b"{'a': 1}",
        "half": b'{"a": {"dtype": "F32"',
        "no text": b"\xff\xfe" * 8,
        "a mark of UTF-8": b"\xef\xbb\xbf{}",
        "deep lists": b"[" * deep,
        "deep tables": b'{"a":' * deep + b"1" + b"}" * deep,
        "deep in an entry": b'{"a":{"dtype":"F32","data_offsets":[0,0],"shape":' + b"[" * deep + b"]" * deep + b"}}",
        "a number of 5000 digits": b'{"a":{"dtype":"F32","data_offsets":[0,' + b"9" * 5000 + b'],"shape":[]}}',
        "a number beyond floats": b'{"a":{"dtype":"F32","data_offsets":[0,1e999],"shape":[]}}',
        "NaN": b'{"a":{"dtype":"F32","data_offsets":[0,NaN],"shape":[]}}',
        "a name twice": b'{"a":' + entry + b',"a":' + entry + b"}",
        "a long name twice": b'{"' + b"a" * 10**5 + b'":' + entry + b',"' + b"a" * 10**5 + b'":' + entry + b"}",
        "a fact twice": b'{"a":{"dtype":"F32","dtype":"F32","shape":[8],"data_offsets":[0,32]}}',
        "metadata twice": b'{"__metadata__":{},"__metadata__":{},"a":' + entry + b"}",
        "half a character": b'{"\\ud800":' + entry + b"}",
        "a long name": b'{"' + b"a" * 10**5 + b'":' + entry + b"}",
    }
    for label, text in texts.items():
        assert WHOLE in attempt(label, altered(whole, tmp_path / "header", WHOLE, file_of(text, data)))


def test_what_harms_nothing_changes_no_bit(whole, tmp_path, attempt):
    header, data = parsed(whole / WHOLE)
    for spaces in range(1, 9):  # the data then begin anywhere, also where no float32 may
        content = file_of(header, data, padding=b" " * spaces)
        attempt.harmless(f"{spaces} spaces", altered(whole, tmp_path / "padded", WHOLE, content))
    entries = [(name, facts) for name, facts in header.items() if name != "__metadata__"]
    for label, other in {
        "another order": dict(reversed(entries)),
        "no metadata": dict(entries),
        "more metadata": {"__metadata__": {"format": "pt", "note": "\u00e9" * 100, "n": 1}, **dict(entries)},
        "metadata of another kind": {**dict(entries), "__metadata__": [1, 2]},
    }.items():
        attempt.harmless(label, altered(whole, tmp_path / "other", WHOLE, file_of(other, data)))
    indented = json.dumps(header, indent=4).encode()
    attempt.harmless("indented", altered(whole, tmp_path / "other", WHOLE, file_of(indented, data)))
    directory = altered(whole, tmp_path / "beside", "pytorch_model.bin", b"not read")
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"not read")
    (directory / INDEX).write_bytes(b"not read")
    attempt.harmless("other files beside it", directory)


def test_wrong_tensors(whole, tmp_path, attempt):
    def rename(old, new):
        return lambda arrays: arrays.update({new: arrays.pop(old)})

    def replace(name, change):
        return lambda arrays: arrays.update({name: change(arrays[name])})

    def unlike(arrays):
        arrays["lm_head.weight"] = arrays["lm_head.weight"][:-1]

    names = [name for name in parsed(whole / WHOLE)[0] if name != "__metadata__"]
    for name in names:
        message = attempt(
            f"{name} lacks", with_tensors(whole, tmp_path / "t", lambda arrays, name=name: arrays.pop(name))
        )
        assert f"{name} [" in message and "is missing" in message
        message = attempt(f"{name} misspelled", with_tensors(whole, tmp_path / "t", rename(name, name[:-2] + "tt")))
        assert f"did you mean '{name[:-2]}tt'?" in message and "no place in the model" in message
        array = with_tensors(whole, tmp_path / "t", replace(name, lambda x: np.append(x, x[:1], axis=0)))
        message = attempt(f"{name} has a row too many", array)
        assert f"{name} is [" in message and "the config asks for [" in message
        message = attempt(f"{name} of integers", with_tensors(whole, tmp_path / "t", replace(name, to(np.int32))))
        assert name in message and "int32" in message
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight"):
        message = attempt(f"{name} transposed", with_tensors(whole, tmp_path / "t", replace(name, np.transpose)))
        assert f"{name} is [" in message
        for shape in ((-1,), (1, *np.shape([[0]]), -1)):
            flat = with_tensors(whole, tmp_path / "t", replace(name, lambda x, shape=shape: x.reshape(shape)))
            assert f"{name} is [" in attempt(f"{name} {shape}", flat)
    for dtype in ("int8", "int16", "int64", "uint8", "uint32", "bool", DTYPES["F8_E4M3"], DTYPES["F8_E5M2"]):
        everything = lambda arrays, dtype=dtype: arrays.update({k: to(dtype)(x) for k, x in arrays.items()})
        assert "quantized" in attempt(f"all {dtype}", with_tensors(whole, tmp_path / "t", everything))
        one = with_tensors(whole, tmp_path / "t", replace(NORM, to(dtype)))
        assert NORM in attempt(f"the norm {dtype}", one)
    for extra in ("model.layers.2.input_layernorm.weight", "model.layers.0.self_attn.q_proj.bias", "x", "", "a" * 9000):
        message = attempt(
            f"{extra[:50]} too many",
            with_tensors(whole, tmp_path / "t", lambda a, e=extra: a.update({e: np.ones(3, "f4")})),
        )
        assert f"{extra[:50]}" in message and WHOLE[:5] in message
    mixed = with_tensors(whole, tmp_path / "t", replace(QUERY, to(np.float16)))
    assert "pass dtype=" in attempt("layers of two dtypes", mixed)
    assert zoo.load(mixed, dtype=jnp.float32).norm.weight.dtype == jnp.float32


def to(dtype):
    return lambda x: x.astype(dtype)


def test_many_wrong_tensors_are_told_soon_and_briefly(make, tmp_path, attempt):
    """Eighty layers under other names: the message does not list them all, and is not long in coming."""
    zoo.save(make("llama", LLAMA | {"num_hidden_layers": 80}), tmp_path / "deep")

    def rename(arrays):
        for name in list(arrays):
            arrays[name.replace("self_attn", "attention").replace("layernorm", "norm")] = arrays.pop(name)

    message = attempt("all renamed", with_tensors(tmp_path / "deep", tmp_path / "t", rename))
    assert "more" in message.splitlines()[-1]


def test_tied_heads(make, tmp_path, attempt):
    zoo.save(make("llama", LLAMA | {"tie_word_embeddings": True}), tmp_path / "tied")
    model = zoo.load(tmp_path / "tied")
    copy = lambda arrays: arrays.update({"lm_head.weight": arrays["model.embed_tokens.weight"].copy()})
    both = with_tensors(tmp_path / "tied", tmp_path / "both", copy)
    assert bits_of(zoo.load(both)) == bits_of(model), "a tied head that is in the file as well"

    def other(arrays):
        copy(arrays)
        arrays["lm_head.weight"][3, 2] += 1

    message = attempt("tied, and not equal", with_tensors(tmp_path / "tied", tmp_path / "both", other))
    assert "lm_head.weight is not model.embed_tokens.weight" in message


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_numbers_that_are_not_finite(whole, tmp_path, attempt, dtype):
    for value, name in itertools.product((np.nan, np.inf, -np.inf), (QUERY, NORM, "model.embed_tokens.weight")):

        def spoil(arrays, value=value, name=name):
            for key in arrays:
                arrays[key] = arrays[key].astype(jnp.dtype(dtype))
            arrays[name].reshape(-1)[5] = value

        message = attempt(f"{value} in {name}", with_tensors(whole, tmp_path / "t", spoil), allocates=True)
        assert name in message and "not finite" in message


def test_numbers_that_a_dtype_does_not_hold(whole, tmp_path, attempt):
    for held, asked, value in (
        ("float32", jnp.float16, 1e6),
        ("float32", jnp.float16, -7e4),
        ("bfloat16", jnp.float16, 1e30),
        ("float64", jnp.float32, 1e300),
        ("float64", None, -1e300),
        ("float64", jnp.bfloat16, 1e39),
        ("float32", jnp.bfloat16, 3.4028e38),
    ):

        def spoil(arrays, held=held, value=value):
            for key in arrays:
                arrays[key] = arrays[key].astype(jnp.dtype(held))
            arrays[NORM][5] = value

        directory = with_tensors(whole, tmp_path / "t", spoil)
        message = attempt(f"{value} to {asked}", directory, allocates=True, dtype=asked)
        assert NORM in message and "too large for" in message


def test_config_that_is_none(whole, tmp_path, attempt):
    deep = 10 * sys.getrecursionlimit()
    texts = {
        "missing": None,
        "empty": b"",
        "no JSON": b"model_type: llama",
        "half": b'{"model_type": "llama"',
        "a list": b"[1]",
        "a word": b'"llama"',
        "null": b"null",
        "no text": b"\xff\xfe{}",
        "a mark of UTF-8": b"\xef\xbb\xbf" + (whole / CONFIG).read_bytes(),
        "deep": b"[" * deep,
        "deep tables": b'{"model_type":' * deep,
        "a number of 5000 digits": b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}",
        "a key twice": b'{"model_type": "llama", "vocab_size": 11, "vocab_size": 12}',
    }
    for label, text in texts.items():
        assert CONFIG in attempt(label, altered(whole, tmp_path / "config", CONFIG, text))
    for name in (None, 1, True, [], ["llama"], {}, {"llama": 1}, "", "lama", "llama ", "LLaMA", "llama\n", "x" * 10**5):
        config = json.loads((whole / CONFIG).read_text()) | {"model_type": name}
        message = attempt(f"model_type {str(name)[:20]}", altered(whole, tmp_path / "config", CONFIG, config))
        assert "model_type" in message and "llama" in message
    assert "did you mean 'llama'?" in attempt(
        "misspelled", altered(whole, tmp_path / "config", CONFIG, {**config, "model_type": "lllama"})
    )
    assert "no model_type" in attempt("without", altered(whole, tmp_path / "config", CONFIG, {"vocab_size": 11}))


CHANGING = [
    ("llama", "quantization_config", {"quant_method": "gptq", "bits": 4}),
    ("llama", "is_encoder_decoder", True),
    ("llama", "add_cross_attention", True),
    ("llama", "pruned_heads", {"0": [1]}),
    ("llama", "chunk_size_feed_forward", 2),
    ("gemma", "use_bidirectional_attention", True),
    ("gemma", "hidden_activation", "silu"),
    ("mistral", "layer_types", ["full_attention", "sliding_attention"]),
    ("qwen2", "use_mrope", True),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True),
]


def test_keys_that_would_change_the_result(make, tmp_path, attempt):
    for family, key, value in CHANGING:
        zoo.save(make(family, GPT2 if family == "gpt2" else LLAMA), tmp_path / family)
        config = json.loads((tmp_path / family / CONFIG).read_text())
        directory = altered(tmp_path / family, tmp_path / "t", CONFIG, config | {key: value})
        message = attempt(f"{family} {key}", directory)
        assert key in message and "would change the result" in message
        assert bits_of(zoo.load(directory, ignore=(key,))) == bits_of(zoo.load(tmp_path / family))


def test_unknown_keys(whole, tmp_path, attempt):
    config = json.loads((whole / CONFIG).read_text())
    for key, meant in (
        ("hiden_size", "hidden_size"),
        ("rms_norm_epsilon", "rms_norm_eps"),
        ("rope_thetas", "rope_theta"),
    ):
        message = attempt(key, altered(whole, tmp_path / "t", CONFIG, config | {key: 4}))
        assert key in message and f"did you mean {meant!r}?" in message
    for key, value in (("no_such_thing", 1), ("", 1), ("x" * 10**5, [1]), ("sizes", list(range(10**5))), ("\ud800", 1)):
        assert CONFIG in attempt(key[:20], altered(whole, tmp_path / "t", CONFIG, config | {key: value}))
    many = {f"no_such_thing_{i}": i for i in range(2000)}
    assert "no_such_thing_0" in attempt("many keys", altered(whole, tmp_path / "t", CONFIG, config | many))
    attempt.harmless("a null", altered(whole, tmp_path / "t", CONFIG, config | {"no_such_thing": None}))


BAD = ("1", "", -1, 0, 0.5, 1e300, 10**30, True, False, None, [], [1], {}, {"a": [{"b": None}]}, float("nan"), 1e999)


def test_values_of_another_kind(whole, tmp_path, attempt, bits):
    """Every key of every kind with values that do not fit it: refused by name, or honored, which no wrong value is
    where it is not finite or the number of something."""
    config = json.loads((whole / CONFIG).read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    original = zoo.load(whole)
    for key, value in itertools.product(config, BAD):
        if key in ("architectures", "dtype", "model_type"):
            continue
        directory = altered(whole, tmp_path / "t", CONFIG, config | {key: value})
        with told(f"{key} = {value}"), limited():
            loaded = []
            message = refusal(lambda directory=directory, loaded=loaded: loaded.append(zoo.load(directory)))
            if message is not None:
                assert str(directory) in message
                continue
            assert bits_of(loaded[0]) == bits and value == value
            honored = bool(next(zoo.models.parameter_paths.find_differences(original, loaded[0]), ""))
            absent = value is None or (not value and key == "rope_parameters")
            same = honored or absent or key in ("max_position_embeddings",) or value == config[key]
            assert same, f"not honored and not refused: {loaded[0]}"
            assert key not in sizes or absent


def test_a_config_that_lies(whole, make, tmp_path, attempt):
    """Sizes that are not those of the tensors, however large, are told from shapes alone."""
    config = json.loads((whole / CONFIG).read_text())
    large = (10**3, 10**6, 10**9, 10**12, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, 10**300)
    for key, near in {
        "num_hidden_layers": (1, 3, 20, 21, 22),
        "vocab_size": (1, 10, 12),
        "hidden_size": (1, 4, 7, 16),
        "intermediate_size": (1, 11, 13),
        "num_attention_heads": (1, 3, 4),
        "num_key_value_heads": (2, 3),
        "head_dim": (1, 2, 3, 8),
    }.items():
        for value in (*near, *large):
            message = attempt(f"{key} = {value}", altered(whole, tmp_path / "t", CONFIG, config | {key: value}))
            assert str(tmp_path / "t") in message
    for change in (
        {"hidden_size": 10**12, "head_dim": 10**12, "num_attention_heads": 10**6, "vocab_size": 10**12},
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"model_type": "gpt2"},
        {"model_type": "gpt_neox"},
        {"model_type": "qwen2"},
        {"hidden_act": "silly"},
        {"head_dim": None, "num_attention_heads": 3},
    ):
        assert str(tmp_path / "t") in attempt(str(change), altered(whole, tmp_path / "t", CONFIG, config | change))
    zoo.save(make("gpt2", GPT2), tmp_path / "gpt2")
    config = json.loads((tmp_path / "gpt2" / CONFIG).read_text())
    for key, near in {
        "n_layer": (1, 3),
        "n_embd": (4, 9),
        "n_head": (3,),
        "n_positions": (5, 7),
        "n_inner": (8,),
    }.items():
        for value in (*near, *large):
            attempt(f"{key} = {value}", altered(tmp_path / "gpt2", tmp_path / "t", CONFIG, config | {key: value}))
    zoo.save(make("qwen2", LLAMA), tmp_path / "qwen2")
    config = json.loads((tmp_path / "qwen2" / CONFIG).read_text())
    for types in (
        *([], ["full_attention"], ["full_attention"] * 3, ["full", "full"], "full_attention", 2, {}, [1, 2]),
        *([None, None], [["full_attention"], []], [{}, {}], ["sliding_attention"] * 2, "ab", {"a": 1, "b": 2}),
    ):
        changed = altered(tmp_path / "qwen2", tmp_path / "t", CONFIG, config | {"layer_types": types})
        assert "layer_types" in attempt(f"layer_types {types}", changed)


ROPE = [
    {"rope_type": "su", "factor": 2.0},
    {"rope_type": "linaer", "factor": 2.0},
    {"rope_type": None},
    {"rope_type": ["linear"], "factor": 2.0},
    {"rope_type": {}, "factor": 2.0},
    {"rope_type": 3},
    {"rope_type": "linear"},
    {"rope_type": "linear", "factor": None},
    {"type": "linear", "factor": "2"},
    {"type": "linear", "factor": -1},
    {"type": "linear", "factor": 0},
    {"type": "linear", "factor": True},
    {"type": "linear", "factor": [2.0]},
    {"type": "linear", "factor": []},
    {"type": "linear", "factor": 1e300},
    {"type": "linear", "factor": {"a": 1}},
    {"type": "linear", "factor": float("nan")},
    {"type": "linear", "factor": 2.0, "low_freq_factor": 1.0},
    {"type": "dynamic"},
    {"type": "llama3", "factor": 8.0},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": [4.0]},
    {"type": "yarn"},
    {"type": "yarn", "factor": 4.0, "beta_slow": "1"},
    {"type": "yarn", "factor": 4.0, "truncate": "yes"},
    {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": [64]},
    {"type": "longrope", "short_factor": [1.0, 1.0]},
    {"type": "longrope", "short_factor": 1.0, "long_factor": 2.0},
    {"type": "longrope", "short_factor": [], "long_factor": []},
    {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
    {"type": "longrope", "short_factor": ["1", "1"], "long_factor": [1.0, 1.0]},
    {"type": "longrope", "short_factor": [1.0, None], "long_factor": [1.0, 1.0]},
    {"type": "longrope", "short_factor": [[1.0, 1.0]], "long_factor": [1.0, 1.0]},
    {"type": "longrope", "short_factor": [1.0, -1.0], "long_factor": [1.0, 1.0]},
    {"rope_theta": "10000"},
    {"rope_theta": -1},
    {"rope_theta": 0},
    {"rope_theta": [10000.0]},
    {"rope_theta": True},
    {"rope_theta": 1e300},
    {"factor": 2.0},
    {"partial_rotary_factor": 0.1},
    {"partial_rotary_factor": 2.0},
    {"partial_rotary_factor": 1e20},
    {"partial_rotary_factor": "half"},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
    {"": 1},
    "linear",
    [["rope_type", "linear"]],
    1,
    True,
]


def test_rotary_embeddings_of_wrong_kinds(whole, tmp_path, attempt):
    config = json.loads((whole / CONFIG).read_text())
    for facts, key in itertools.product(ROPE, ("rope_parameters", "rope_scaling")):
        changed = {k: v for k, v in config.items() if k != "rope_parameters"} | {key: facts}
        message = attempt(f"{key} {facts}", altered(whole, tmp_path / "t", CONFIG, changed))
        assert "rope" in message or "factor" in message or "rotary" in message
    for key, values in {
        "rope_theta": ("1", -1, 0, True, [1.0], {}, 1e300),
        "partial_rotary_factor": ("1", -1, True, [0.5], 4.0),
        "rotary_pct": (0.5,),
    }.items():
        changed = {k: v for k, v in config.items() if k != "rope_parameters"}
        for value in values:
            assert key in attempt(f"{key} {value}", altered(whole, tmp_path / "t", CONFIG, changed | {key: value}))


def test_more_of_a_head_than_there_is_cannot_turn(make, tmp_path, attempt):
    zoo.save(
        make("gpt_neox", {"vocab_size": 11, "hidden_size": 32, "num_attention_heads": 2} | ONE_LAYER), tmp_path / "a"
    )
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    for factor in (0.1, 1.5, 2.0, 1e20):
        changed = config | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": factor}}
        message = attempt(f"factor {factor}", altered(tmp_path / "a", tmp_path / "t", CONFIG, changed))
        assert "rotary" in message or "partial_rotary_factor" in message


def test_a_dtype_that_is_no_float_is_refused(whole):
    """Numbers would be cut down to 0 and 1."""
    for dtype in (jnp.int32, jnp.int8, bool, jnp.complex64):
        with pytest.raises((ValueError, TypeError), match=jnp.dtype(dtype).name):
            zoo.load(whole, dtype=dtype)


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_are_never_opened(whole, tmp_path, attempt):
    mark = tmp_path / "unpickled"
    for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "model.pkl"):
        directory = altered(whole, tmp_path / "t", WHOLE, None)
        (directory / name).write_bytes(pickle.dumps(Bomb(mark)))
        message = attempt(name, directory)
        assert name in message and "never" in message
        for wanted in (WHOLE, "model-00001-of-00001.safetensors"):
            (directory / wanted).write_bytes(pickle.dumps(Bomb(mark)))
            (directory / INDEX).write_text(json.dumps({"weight_map": {QUERY: wanted}}))
            assert wanted in attempt(f"a pickle as {wanted}", directory)
            (directory / wanted).unlink()
        (directory / INDEX).write_text(json.dumps({"weight_map": {QUERY: name}}))
        assert name in attempt(f"an index of {name}", directory)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Bomb(mark)))
    assert mark.exists(), "the bomb would have gone off"


def test_an_index_that_leaves_its_directory(sharded, tmp_path, attempt):
    """What it names is there, and would be read."""
    index = json.loads((sharded / INDEX).read_text())
    first = sorted(set(index["weight_map"].values()))[0]
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(sharded, elsewhere)
    directory = tmp_path / "deep" / "t"
    for name in (
        *(f"../../elsewhere/{first}", str(elsewhere / first), f"inner/{first}", f"./{first}", f"inner/../{first}"),
        *(f"inner\\{first}", f"..\\{first}", f"C:\\{first}", f"\\\\host\\{first}", f"/{first}", f"//{first}"),
        *(
            f"{first}/",
            f"{first}/.",
            f"~/{first}",
            f"file://{elsewhere / first}",
            "..",
            ".",
            "",
            "/",
            "\0",
            f"{first}\0",
        ),
        *("a" * 300 + ".safetensors", "a" * 10**5 + ".safetensors", "\ud800.safetensors", "/dev/zero", "/etc/passwd"),
    ):
        listed = {key: name if file == first else file for key, file in index["weight_map"].items()}
        altered(sharded, directory, INDEX, {"weight_map": listed})
        (directory / "inner").mkdir()
        shutil.copy(sharded / first, directory / "inner")
        assert INDEX in attempt(f"an index of {name[:40]}", directory)


def test_an_index_that_does_not_agree_with_its_shards(sharded, tmp_path, attempt):
    index = json.loads((sharded / INDEX).read_text())
    listed = index["weight_map"]
    shards = sorted(set(listed.values()))
    assert len(shards) > 2
    for shard in shards:
        assert shard in attempt(f"{shard} lacks", altered(sharded, tmp_path / "t", shard, None))
        other = shards[shards.index(shard) - 1]
        message = attempt(
            f"{shard} is {other}", altered(sharded, tmp_path / "t", shard, (sharded / other).read_bytes())
        )
        assert shard in message and "disagree" in message
        everything = {"weight_map": dict.fromkeys(listed, shard)}
        assert shard in attempt(f"all in {shard}", altered(sharded, tmp_path / "t", INDEX, everything))
    for name in listed:
        less = {"weight_map": {key: file for key, file in listed.items() if key != name}}
        assert name in attempt(f"{name} not listed", altered(sharded, tmp_path / "t", INDEX, less))
        moved = {"weight_map": listed | {name: next(shard for shard in shards if shard != listed[name])}}
        assert "disagree" in attempt(f"{name} elsewhere", altered(sharded, tmp_path / "t", INDEX, moved))
    more = {"weight_map": listed | {"more.weight": shards[0]}}
    assert "more.weight" in attempt("one too many", altered(sharded, tmp_path / "t", INDEX, more))
    for label, content in {
        "empty": b"",
        "no JSON": b"{'weight_map': {}}",
        "a list": b"[]",
        "null": b"null",
        "no map": {"metadata": {}},
        "an empty map": {"weight_map": {}},
        "a list as map": {"weight_map": list(listed)},
        "a word as map": {"weight_map": "model.safetensors"},
        "numbers as files": {"weight_map": dict.fromkeys(listed, 1)},
        "nulls as files": {"weight_map": dict.fromkeys(listed)},
        "lists as files": {"weight_map": {key: [file] for key, file in listed.items()}},
        "deep": b'{"weight_map":' + b"[" * 10**5,
        "a name twice": b'{"weight_map": {"a": "b.safetensors", "a": "b.safetensors"}}',
        "no text": b"\xff\xfe{}",
        "half": (sharded / INDEX).read_bytes()[:-9],
    }.items():
        assert INDEX in attempt(f"index: {label}", altered(sharded, tmp_path / "t", INDEX, content))
    attempt.harmless("no metadata", altered(sharded, tmp_path / "t", INDEX, {"weight_map": listed}))
    wrong = {"weight_map": listed, "metadata": {"total_size": -1}, "more": [1]}
    attempt.harmless("wrong metadata", altered(sharded, tmp_path / "t", INDEX, wrong))


def test_what_is_no_checkpoint(whole, tmp_path, attempt, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("meta-llama/Llama-3.2-1B", "openai-community/gpt2"):
        message = attempt("a name on a hub", name)
        assert f"hf download {name} --local-dir {name.split('/')[1]}" in message
    for place in ("nowhere", tmp_path / "no" / "where", "/no/where", "a/b/c", "a" * 300, "a" * 5000, "a/" * 3000):
        assert "no directory" in attempt(f"{str(place)[:30]} is not there", place)
    for name in (WHOLE, CONFIG):
        message = attempt("a file", whole / name)
        assert name in message and "pass the directory" in message
        directory = altered(whole, tmp_path / "t", name, None)
        assert name in attempt(f"{name} is not there", directory)
        (directory / name).mkdir()
        assert name in attempt(f"{name} is a directory", directory)
        (directory / name).rmdir()
        (directory / name).symlink_to(tmp_path / "nowhere")
        assert name in attempt(f"{name} is a link to nothing", directory)
        (directory / name).unlink()
        (directory / name).symlink_to(directory / name)
        assert name in attempt(f"{name} is a link to itself", directory)
    (tmp_path / "empty").mkdir()
    assert str(tmp_path / "empty") in attempt("an empty directory", tmp_path / "empty")
    with (tmp_path / "empty" / CONFIG).open("w") as file:
        json.dump({"model_type": "llama"}, file)
    assert "nothing" in attempt("a config alone", tmp_path / "empty") or CONFIG in attempt("again", tmp_path / "empty")
    (tmp_path / "empty" / "nan.safetensors").touch()
    assert "nan.safetensors" in attempt("a file of another name", tmp_path / "empty")
    with (tmp_path / "empty" / WHOLE).open("wb") as file:
        file.truncate(2**40)  # a terabyte that is not there
    assert WHOLE in attempt("a terabyte of nothing", tmp_path / "empty")
