"""Attack the reader of tokenizers: mutated `tokenizer.json` and `config.json`, read for training and for generation.

    python scripts/attack/mutate_tokenizers.py                      # 500 mutations, half a minute
    python scripts/attack/mutate_tokenizers.py --cases 5000 --seed 1

Three tokenizers are made (bytes, byte-level BPE, BPE with byte fallback). Each case mutates one file of one of them: a
bit, a piece cut out or doubled, or a value of the JSON replaced, removed or renamed. A process of its own reads it.
Exits 1 if any outcome is a forbidden one.
"""

import copy
import json
import random
import shutil
import tempfile
import traceback
from pathlib import Path
from typing import Any

from scripts.attack.watched import HANG, LARGE, RAW, attack, parse_options

SECONDS = 5
REFUSED, EQUAL, DIFFERENT, WRONG = "refused by name", "reads equal", "differs, agrees", "inconsistent"
"""`DIFFERENT`: another tokenizer, which agrees with itself. `WRONG`: one that loses text or miscounts it."""
OUTCOMES = (REFUSED, EQUAL, DIFFERENT, WRONG, RAW, HANG, LARGE)
_originals: dict[Path, tuple] = {}
TEXT = "def f(x):\n    return x + 1  # the quick brown fox, naïve λ ✓\n"
KINDS = ("bit", "cut", "double", "junk", "junk", "remove", "other", "rename")
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

    from zoo.text.tokenizers import ByteTokenizer, train_bpe

    paths = [directory / name for name in ("bytes", "byte_level", "byte_fallback")]
    for path in paths:
        path.mkdir(parents=True)
    ByteTokenizer().save(paths[0])
    train_bpe([TEXT.encode() * 20, b"a quick test"], 300, paths[1] / "tokenizer.json")
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


def mutate(content: bytes, kind: str, rng: random.Random) -> bytes:
    """Return a mutated file: of its bytes, or of its JSON."""
    at = rng.randrange(len(content))
    if kind == "bit":
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    if kind == "cut":
        return content[:at] + content[rng.choice([len(content), at + 1, at + 20]) :]
    if kind == "double":
        return content[:at] + content[max(at - rng.randrange(50), 0) :]
    return json.dumps(mutate_value(json.loads(content), kind, rng)).encode()


def mutate_value(tree: Any, kind: str, rng: random.Random) -> Any:
    """Replace, remove, copy or rename one value of a JSON tree."""
    tree = copy.deepcopy(tree)
    node, parents = tree, []
    while isinstance(node, dict | list) and node:  # a level at a time, so that few large mappings do not take all
        key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        parents.append((node, key))
        node = node[key]
    owner, key = rng.choice(parents)
    other = rng.choice(list(owner.values()) if isinstance(owner, dict) else owner)
    if kind == "remove":
        del owner[key]
    elif kind == "rename" and isinstance(owner, dict):
        owner[f"{key}{rng.choice(['', 'x', ' '])}"[rng.randrange(2) :]] = owner.pop(key)
    else:
        owner[key] = rng.choice(JUNK) if kind == "junk" else copy.deepcopy(other)
    return tree


def read(path: Path) -> tuple[Any, ...]:
    """Read a tokenizer for training; return all that must agree with itself, after checking that it does."""
    import numpy as np

    from zoo.text.tokenizers import read_tokenizer

    tokenizer = read_tokenizer(path)
    tokens = next(iter(tokenizer.encode_all([TEXT.encode()])))
    decoded = tokenizer.decode(tokens)
    assert len(tokenizer.token_bytes) == tokenizer.vocab > tokens.max(initial=0) >= 0
    assert tokenizer.token_bytes[tokenizer.separator] == 0
    if not json.loads((path / "tokenizer.json").read_bytes()).get("normalizer"):  # which may change text
        assert decoded.removeprefix(" ") == TEXT, f"lost text: {decoded!r}"
        added_space = TEXT[0] != " " and decoded.startswith(" ")
        assert tokenizer.token_bytes[tokens].sum() == len(TEXT.encode()) + added_space
    again = next(iter(tokenizer.encode_all([TEXT.encode()])))
    assert np.array_equal(tokens, again), "another encoding of the same text"
    return tokenizer.vocab, tokenizer.separator, tokens.tolist(), tokenizer.token_bytes.tolist()


def read_for_generation(path: Path) -> tuple[Any, ...]:
    """Read a tokenizer as the command line does."""
    from zoo.text.stream_decoder import StreamDecoder
    from zoo.text.tokenizers import count_bytes, find_tokenizer

    tokenizer = find_tokenizer(path, 256)
    assert tokenizer is not None
    tokens, offsets = tokenizer.encode_with_offsets(TEXT)
    lengths = count_bytes(TEXT, offsets)
    assert len(tokens) == len(lengths) and lengths.sum() == len(TEXT.encode()) * bool(len(tokens))
    stream = StreamDecoder(tokenizer.decode)
    return tokenizer.prefix, tokens.tolist(), "".join(stream.push(int(token)) for token in tokens) + stream.flush()


def read_case(case: tuple[Path, Path]) -> tuple[str, str]:
    """Return the outcome of a mutated directory, and a detail: the worse one of both readers."""
    path, source = case
    if source not in _originals:
        _originals[source] = read(source), read_for_generation(source)
    outcomes = []
    for reader, original in zip((read, read_for_generation), _originals[source], strict=True):
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
    ranks = (EQUAL, DIFFERENT, REFUSED, WRONG, RAW)
    return max(outcomes, key=lambda outcome: ranks.index(outcome[0]))


def main() -> int:
    options = parse_options(__doc__, cases=500)
    with tempfile.TemporaryDirectory() as folder:
        sources = make_tokenizers(Path(folder))

        def make_case(number: int, rng: random.Random, directory: Path) -> tuple[str, str, Path]:
            source, kind = rng.choice(sources), rng.choice(KINDS)
            mutated = rng.choice(["tokenizer.json"] * 4 + ["config.json"])
            shutil.copytree(source, directory)
            (directory / mutated).write_bytes(mutate((source / mutated).read_bytes(), kind, rng))
            return kind, mutated, source

        return attack(read_case, sources, make_case, options, outcomes=OUTCOMES, num_allowed=3, seconds=SECONDS)


if __name__ == "__main__":
    raise SystemExit(main())
