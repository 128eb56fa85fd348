"""Damaged safetensors files and shards: one clear error each, before anything is allocated; harmless changes load."""

import collections
import json
import pickle
import shutil
import sys
from pathlib import Path

import numpy as np

import zoo
from zoo.weights.safetensors import open_safetensors

from .damage import INDEX, LLAMA, NORM, QUERY, WHOLE, alter, build_file, catch_error, labeled, parse_file, time_limit


def test_safetensors_truncated_or_extended_file_is_refused(checkpoint, sharded, tmp_path, attempt):
    content = (checkpoint / WHOLE).read_bytes()
    begins = 8 + int.from_bytes(content[:8], "little")
    points = {*range(12), *np.linspace(12, len(content) - 1, 40, dtype=int), begins - 1, begins, begins + 1}
    for point in sorted(map(int, points)):
        message = attempt(f"cut at {point}", alter(checkpoint, tmp_path / "cut", WHOLE, content[:point]))
        assert WHOLE in message
    for more in (b"\0", b" " * 8, content):
        message = attempt(f"{len(more)} more", alter(checkpoint, tmp_path / "grown", WHOLE, content + more))
        assert WHOLE in message
    for shard in sorted(path.name for path in sharded.glob("model-*")):
        content = (sharded / shard).read_bytes()
        for point in (0, 7, 8, 100, len(content) - 1):
            assert shard in attempt(f"{shard} cut at {point}", alter(sharded, tmp_path / "cut", shard, content[:point]))


def test_safetensors_wrong_header_length_is_refused(checkpoint, tmp_path, attempt):
    content = (checkpoint / WHOLE).read_bytes()
    right = int.from_bytes(content[:8], "little")
    wrong = {right + by for by in (-100, -8, -2, -1, 1, 2, 8, 100)}
    wrong |= {0, 1, 2, 3, len(content) - 8, len(content), 10**8, 10**8 + 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1}
    for length in sorted(wrong - {right}):
        damaged = length.to_bytes(8, "little") + content[8:]
        assert WHOLE in attempt(f"length {length}", alter(checkpoint, tmp_path / "length", WHOLE, damaged))


def test_safetensors_header_with_a_flipped_bit(make, tmp_path, attempt):
    """Flip one bit of each byte of length and header: the header is refused, or describes other tensors, and the
    checkpoint is refused. Only bits of padding and metadata are harmless."""
    checkpoint = tmp_path / "checkpoint"
    zoo.save(make("llama", LLAMA | {"num_hidden_layers": 1}), checkpoint)
    content = (checkpoint / WHOLE).read_bytes()
    ends = 8 + int.from_bytes(content[:8], "little")
    table = lambda path: {name: (x.dtype, x.shape, x.read().tobytes()) for name, x in open_safetensors(path).items()}
    right = table(checkpoint / WHOLE)
    path = tmp_path / WHOLE
    draw = np.random.default_rng(0)
    outcomes = collections.Counter()
    for place in range(ends):
        damaged = bytearray(content)
        bit = int(draw.integers(8))
        damaged[place] ^= 1 << bit
        path.write_bytes(damaged)
        label, found = f"bit {bit} of byte {place}", {}
        with labeled(label), time_limit():
            message = catch_error(lambda found=found: found.update(table(path)))
        if message is not None:
            assert WHOLE in message
            outcomes["refused"] += 1
        elif found == right:
            outcomes["harmless"] += 1
        else:
            outcomes["another"] += 1
            if outcomes["another"] % 30 == 1:
                attempt(label, alter(checkpoint, tmp_path / "flip", WHOLE, bytes(damaged)))
    assert outcomes["refused"] > outcomes["another"] > 100 > outcomes["harmless"] > 0


def test_safetensors_header_with_random_bytes(checkpoint, tmp_path):
    """Random bytes anywhere before the data: refused, or parsed into offsets that tile the file."""
    content = (checkpoint / WHOLE).read_bytes()
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
        with labeled(f"trial {trial}"), time_limit():
            found = {}
            if catch_error(lambda found=found: found.update(open_safetensors(path))) is None:
                assert sum(x.read().nbytes for x in found.values()) <= len(content) - ends


def headers():
    """Yield (label of the damage, function that damages a header)."""

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
        yield f"dtype {code}", change(dtype=code)
    yield "a long dtype", change(dtype="F" * 10**5)
    for shape in ([8], [8, 7], [9, 8], [8, 8, 2], [64, 0], [], [-8, -8], [8.0, 8], ["8", 8], [True, 64], [None], 64):
        yield f"shape {shape}", change(shape=shape)
    for shape in ("8", None, {}, [[8], 8], [2**62, 8], [2**61] * 2, [2**61] * 400, [1] * 10**4, [10**400, 8]):
        yield f"shape {str(shape)[:30]}", change(shape=shape)
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
        yield f"offsets {start} {stop}", shifted(QUERY, start, stop)
    yield "offsets reversed", lambda header: header[QUERY]["data_offsets"].reverse()
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
        yield f"offsets {offsets}", change(data_offsets=offsets)
    yield "places of two tensors swapped", swapped
    yield "two tensors in one place", lambda header: header.update(twice=header[QUERY])
    yield "a hole", lambda header: header.pop(QUERY)
    yield "no tensor at all", lambda header: header.clear()
    for key in ("dtype", "shape", "data_offsets"):
        yield f"no {key}", lambda header, key=key: header[QUERY].pop(key)
    for facts in (None, 1, "F32", [], [1, 2, 3], {}):
        yield f"facts {facts}", lambda header, facts=facts: header.update({QUERY: facts})
    for metadata in ([1, 2], {"n": 1}):
        yield f"metadata {metadata}", lambda header, metadata=metadata: header.update(__metadata__=metadata)


def test_safetensors_inconsistent_header_is_refused(checkpoint, tmp_path, attempt):
    for label, change in headers():
        header, data = parse_file(checkpoint / WHOLE)
        change(header)
        assert WHOLE in attempt(label, alter(checkpoint, tmp_path / "header", WHOLE, build_file(header, data)))
    _, data = parse_file(checkpoint / WHOLE)
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
        "a fact twice": b'{"a":{"dtype":"F32","dtype":"F32","shape":[8],"data_offsets":[0,32]}}',
        "metadata twice": b'{"__metadata__":{},"__metadata__":{},"a":' + entry + b"}",
        "half a character": b'{"\\ud800":' + entry + b"}",
        "a long name": b'{"' + b"a" * 10**5 + b'":' + entry + b"}",
    }
    for label, text in texts.items():
        assert WHOLE in attempt(label, alter(checkpoint, tmp_path / "header", WHOLE, build_file(text, data)))


def test_safetensors_harmless_changes_load_the_same_bits(checkpoint, tmp_path, attempt):
    header, data = parse_file(checkpoint / WHOLE)
    for spaces in range(1, 9):  # the data then begin anywhere, also where no float32 may
        content = build_file(header, data, padding=b" " * spaces)
        attempt.harmless(f"{spaces} spaces", alter(checkpoint, tmp_path / "padded", WHOLE, content))
    entries = [(name, facts) for name, facts in header.items() if name != "__metadata__"]
    for label, other in {
        "another order": dict(reversed(entries)),
        "no metadata": dict(entries),
        "more metadata": {**dict(entries), "__metadata__": {"format": "pt", "note": "\u00e9" * 100}},
    }.items():
        attempt.harmless(label, alter(checkpoint, tmp_path / "other", WHOLE, build_file(other, data)))
    indented = json.dumps(header, indent=4).encode()
    attempt.harmless("indented", alter(checkpoint, tmp_path / "other", WHOLE, build_file(indented, data)))
    directory = alter(checkpoint, tmp_path / "beside", "pytorch_model.bin", b"not read")
    (directory / "model-00001-of-00002.safetensors").write_bytes(b"not read")
    (directory / INDEX).write_bytes(b"not read")
    attempt.harmless("other files beside it", directory)


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_safetensors_reader_never_unpickles(checkpoint, tmp_path, attempt):
    mark = tmp_path / "unpickled"
    for name in ("pytorch_model.bin", "consolidated.00.pth", "model.pt", "model.ckpt", "model.pkl"):
        directory = alter(checkpoint, tmp_path / "t", WHOLE, None)
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
    assert mark.exists(), "the bomb works"


def test_shard_index_outside_the_directory_is_refused(sharded, tmp_path, attempt):
    """The files that the index names exist and would load."""
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
        alter(sharded, directory, INDEX, {"weight_map": listed})
        (directory / "inner").mkdir()
        shutil.copy(sharded / first, directory / "inner")
        assert INDEX in attempt(f"an index of {name[:40]}", directory)


def test_shard_index_unlike_the_shards_is_refused(sharded, tmp_path, attempt):
    index = json.loads((sharded / INDEX).read_text())
    listed = index["weight_map"]
    shards = sorted(set(listed.values()))
    assert len(shards) > 2
    for shard in shards:
        assert shard in attempt(f"{shard} lacks", alter(sharded, tmp_path / "t", shard, None))
        other = shards[shards.index(shard) - 1]
        message = attempt(f"{shard} is {other}", alter(sharded, tmp_path / "t", shard, (sharded / other).read_bytes()))
        assert shard in message and "disagree" in message
        everything = {"weight_map": dict.fromkeys(listed, shard)}
        assert shard in attempt(f"all in {shard}", alter(sharded, tmp_path / "t", INDEX, everything))
    for name in listed:
        less = {"weight_map": {key: file for key, file in listed.items() if key != name}}
        assert name in attempt(f"{name} not listed", alter(sharded, tmp_path / "t", INDEX, less))
        moved = {"weight_map": listed | {name: next(shard for shard in shards if shard != listed[name])}}
        assert "disagree" in attempt(f"{name} elsewhere", alter(sharded, tmp_path / "t", INDEX, moved))
    more = {"weight_map": listed | {"more.weight": shards[0]}}
    assert "more.weight" in attempt("one too many", alter(sharded, tmp_path / "t", INDEX, more))
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
        assert INDEX in attempt(f"index: {label}", alter(sharded, tmp_path / "t", INDEX, content))
    attempt.harmless("no metadata", alter(sharded, tmp_path / "t", INDEX, {"weight_map": listed}))
    wrong = {"weight_map": listed, "metadata": {"total_size": -1}, "more": [1]}
    attempt.harmless("wrong metadata", alter(sharded, tmp_path / "t", INDEX, wrong))
