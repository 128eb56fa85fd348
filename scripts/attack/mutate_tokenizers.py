"""Attack the reader of tokenizers: mutated `tokenizer.json` and `config.json`, read for training and for generation.

    python scripts/attack/mutate_tokenizers.py                      # 500 mutations, half a minute
    python scripts/attack/mutate_tokenizers.py --cases 5000 --seed 1

Three tokenizers are made (bytes, byte-level BPE, BPE with byte fallback). Each case mutates one file of one of them: a
bit, a piece cut out or doubled, or a value of the JSON replaced, removed or renamed. A process of its own reads it.
Exits 1 if any outcome is a forbidden one.
"""

import argparse
import collections
import copy
import json
import multiprocessing
import random
import resource
import tempfile
import traceback
from pathlib import Path
from typing import Any

SECONDS, MEMORY = 5, 2**30
REFUSED, EQUAL, DIFFERENT = "refused by name", "reads equal", "reads different, consistent"
RAW, WRONG, HANG, LARGE = "raw traceback", "reads inconsistent", f"hang of {SECONDS} s, or dead", "memory of 1 GB"
FORBIDDEN = (RAW, WRONG, HANG, LARGE)
TEXT = "def f(x):\n    return x + 1  # the quick brown fox, naïve λ ✓\n"
JUNK = (
    None,
    True,
    -1,
    0,
    1.5,
    2**16,
    2**31,
    2**64,
    10**400,
    "",
    "\0",
    "\ud800",
    "x" * 10_000,
    [],
    {},
    [[[]]],
    {"a": 1},
)


def make_tokenizers(directory: Path) -> list[Path]:
    """Write the three tokenizers, each with its configuration."""
    import tokenizers

    from zoo.text.tokenizers import BPETokenizer, ByteTokenizer

    paths = [directory / name for name in ("bytes", "byte_level", "byte_fallback")]
    for path in paths:
        path.mkdir(parents=True)
    ByteTokenizer().save(paths[0])
    BPETokenizer.train([TEXT.encode() * 20, b"a quick test"], 300, paths[1] / "tokenizer.json")
    pieces = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abdefinrtx", "▁f"]
    words = {piece: index for index, piece in enumerate(pieces)}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [("▁", "f")], byte_fallback=True))
    made.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    rest = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()]
    made.decoder = tokenizers.decoders.Sequence([tokenizers.decoders.Replace("▁", " "), *rest])
    made.add_special_tokens(["<s>"])
    made.save(str(paths[2] / "tokenizer.json"))
    for path, vocab in zip(paths, (256, 300, 320), strict=True):
        (path / "config.json").write_text(json.dumps({"vocab_size": vocab, "bos_token_id": 0, "eos_token_id": [0, 2]}))
    return paths


def mutate(content: bytes, random: random.Random) -> bytes:
    """Return a mutated file: of its bytes, or of its JSON."""
    kind = random.choice(["bit", "cut", "double", *["value"] * 5])
    at = random.randrange(len(content))
    if kind == "bit":
        return content[:at] + bytes([content[at] ^ 1 << random.randrange(8)]) + content[at + 1 :]
    if kind == "cut":
        return content[:at] + content[random.choice([len(content), at + 1, at + 20]) :]
    if kind == "double":
        return content[:at] + content[max(at - random.randrange(50), 0) :]
    return json.dumps(mutate_value(json.loads(content), random)).encode()


def mutate_value(tree: Any, random: random.Random) -> Any:
    """Replace, remove, copy or swap one value of a JSON tree."""
    tree = copy.deepcopy(tree)
    node, parents = tree, []
    while isinstance(node, dict | list) and node:  # a level at a time, so that few large mappings do not take all
        key = random.choice(list(node) if isinstance(node, dict) else range(len(node)))
        parents.append((node, key))
        node = node[key]
    owner, key = random.choice(parents)
    other = random.choice(list(owner.values()) if isinstance(owner, dict) else owner)
    kind = random.choice(["junk", "junk", "remove", "other", "rename"])
    if kind == "remove":
        del owner[key]
    elif kind == "rename" and isinstance(owner, dict):
        owner[f"{key}{random.choice(['', 'x', ' '])}"[random.randrange(2) :]] = owner.pop(key)
    else:
        owner[key] = random.choice(JUNK) if kind == "junk" else copy.deepcopy(other)
    return tree


def read(path: Path) -> tuple[Any, ...]:
    """Read a tokenizer for training; return all that must agree with itself, after checking that it does."""
    import numpy as np

    from zoo.text.tokenizers import read_tokenizer

    tokenizer = read_tokenizer(path)
    tokens = next(iter(tokenizer.encode_all([TEXT.encode()])))
    decoded = tokenizer.decode(tokens)
    assert len(tokenizer.token_bytes) == tokenizer.vocab > tokens.max(initial=0) >= 0
    assert tokenizer.token_bytes[tokens].sum() == len(decoded) and tokenizer.token_bytes[tokenizer.separator] == 0
    changes_text = json.loads((path / "tokenizer.json").read_bytes()).get("normalizer")
    assert decoded.decode(errors="replace") == TEXT or changes_text, f"lost text: {decoded!r}"
    again = next(iter(tokenizer.encode_all([TEXT.encode()])))
    assert np.array_equal(tokens, again), "another encoding of the same text"
    return tokenizer.vocab, tokenizer.separator, tokens.tolist(), tokenizer.token_bytes.tolist()


def read_for_generation(path: Path) -> tuple[Any, ...]:
    """Read a tokenizer as the command line does."""
    from zoo.text.checkpoint_tokenizers import StreamDecoder, find_tokenizer

    tokenizer = find_tokenizer(path, 256)
    assert tokenizer is not None
    tokens, lengths = tokenizer.encode(TEXT)
    assert len(tokens) == len(lengths) and lengths.sum() == len(TEXT.encode()) * bool(len(tokens))
    stream = StreamDecoder(tokenizer.decode)
    return tokenizer.prefix, tokens.tolist(), "".join(stream.push(int(token)) for token in tokens) + stream.flush()


def read_case(path: Path, originals: tuple) -> tuple[str, str]:
    """Return the outcome of a mutated directory, and a detail: the worse one of both readers."""
    outcomes = []
    for reader, original in zip((read, read_for_generation), originals, strict=True):
        try:
            outcomes.append((EQUAL, "") if reader(path) == original else (DIFFERENT, ""))
        except (ValueError, FileNotFoundError) as error:
            named = type(error).__name__ in ("TokenizerError", "FileNotFoundError") and str(path) in str(error)
            is_line = len(str(error).splitlines()) == 1
            outcomes.append((REFUSED, str(error)) if named and is_line else (RAW, traceback.format_exc()))
        except AssertionError:
            outcomes.append((WRONG, traceback.format_exc()))
        except BaseException:
            outcomes.append((RAW, traceback.format_exc()))
    ranks = (EQUAL, DIFFERENT, REFUSED, *FORBIDDEN)
    return max(outcomes, key=lambda outcome: ranks.index(outcome[0]))


def work(connection: Any) -> None:
    """Read one case after another, in a process that may hang or die."""
    originals = {}
    connection.send("ready")
    while True:
        path, source = connection.recv()
        if source not in originals:
            originals[source] = read(source), read_for_generation(source)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome, detail = read_case(path, originals[source])
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        connection.send((LARGE, f"{grown:,} bytes") if grown > MEMORY else (outcome, detail))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=500, help="number of mutations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations")
    parser.add_argument("--show", type=int, default=3, help="details to print of each outcome")
    options = parser.parse_args()
    context, found = multiprocessing.get_context("spawn"), collections.defaultdict(list)

    def start() -> tuple[Any, Any]:
        here, there = context.Pipe()
        process = context.Process(target=work, args=(there,), daemon=True)
        process.start()
        there.close()
        here.recv()
        return process, here

    with tempfile.TemporaryDirectory() as folder:
        sources = make_tokenizers(Path(folder) / "sources")
        process, connection = start()
        for source in sources:  # the first read imports the library
            connection.send((source, source))
            assert connection.recv()[0] == EQUAL
        for case in range(options.cases):
            randomness = random.Random(f"{options.seed} {case}")
            source, target = randomness.choice(sources), Path(folder) / str(case)
            target.mkdir()
            mutated = randomness.choice(["tokenizer.json"] * 4 + ["config.json"])
            for name in ("tokenizer.json", "config.json"):
                content = (source / name).read_bytes()
                (target / name).write_bytes(mutate(content, randomness) if name == mutated else content)
            outcome, detail = HANG, f"{source.name}/{mutated}"
            try:
                connection.send((target, source))
                if connection.poll(SECONDS):
                    outcome, detail = connection.recv()
            except (EOFError, OSError):
                pass
            if outcome == HANG:
                process.kill()
                process, connection = start()
            found[outcome].append(f"case {case}: {detail}")
        process.kill()
    print(f"{options.cases} mutations, seed {options.seed}")
    for outcome in (REFUSED, EQUAL, DIFFERENT, *FORBIDDEN):
        print(f"{len(found[outcome]):6} {outcome}")
    for outcome in FORBIDDEN:
        for line in found[outcome][: options.show]:
            print(f"\n{outcome}, {line}")
    return int(any(found[outcome] for outcome in FORBIDDEN))


if __name__ == "__main__":
    raise SystemExit(main())
