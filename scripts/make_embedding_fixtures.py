"""Write the reference cases of text embeddings: tiny random encoders in directories of sentence-transformers.

    python scripts/make_embedding_fixtures.py                         # all of tests/fixtures/embeddings

Needs `pip install sentence-transformers==6.2.0` and what scripts/make_fixtures.py needs. A case is what `save` writes,
less the tokenizer and the model card, and expected.safetensors:

    input_ids, attention_mask    texts of several lengths, padded on the right as its tokenizer does
    embeddings                   what `encode` returns for these texts
"""

import importlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import tyro

from scripts.make_encoder_fixtures import LOCAL, TEXT, Case, build, find_padding

try:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    sentence_transformers: Any = importlib.import_module("sentence_transformers")
    safetensors: Any = importlib.import_module("safetensors.torch")
except ImportError:
    torch = transformers = sentence_transformers = safetensors = None

WORDS = [*"[PAD] [UNK] [CLS] [SEP] [MASK]".split(), *"abcdefghijklmnopqrstuvwxyz"]
TEXTS = ["a b c d e f", "q", "x y z x y z x", "k l m n"]
CASES: dict[str, tuple[Case, tuple[str, ...], bool]] = {
    "bert_mean": (Case("BertModel", TEXT), ("mean",), True),
    "modernbert_cls": (Case("ModernBertModel", LOCAL), ("cls",), False),
    "bert_several": (Case("BertModel", TEXT), ("max", "mean_sqrt_len_tokens", "lasttoken"), True),
    "mpnet_mean": (Case("MPNetModel", TEXT), ("mean",), True),
}
"""The encoder, its pooling, and whether embeddings are normalized."""
LEFT_OUT = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "README.md")


def main(*, out: Path = Path(__file__).parents[1] / "tests/fixtures/embeddings", only: tuple[str, ...] = ()) -> None:
    """Write the cases.

    Args:
        out: Folder for the cases, one subfolder each.
        only: Names of cases. By default all.
    """
    if sentence_transformers is None:
        raise SystemExit("This needs sentence-transformers: pip install torch==2.13.0 sentence-transformers==6.2.0")
    for number, name in enumerate(only or CASES):
        case, modes, normalized = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            make_encoder(case, Path(folder), seed=number)
            write_case(Path(folder), out / name, modes, normalized)


def make_encoder(case: Case, folder: Path, seed: int) -> None:
    """Save an encoder with a tokenizer of letters."""
    np: Any = importlib.import_module("numpy")
    build(case, np.random.default_rng(seed), seed).save_pretrained(folder)
    words = WORDS[1:]
    words.insert(find_padding(case), WORDS[0])  # MPNet's token 1 has no position, so it is to be padding
    transformers.BertTokenizerFast(vocab={word: number for number, word in enumerate(words)}).save_pretrained(folder)


def write_case(encoder: Path, folder: Path, modes: tuple[str, ...], normalized: bool) -> None:
    """Encode the texts, and save what a directory has and what was computed."""
    modules: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    first = modules.Transformer(str(encoder), max_seq_length=12)
    rest = [modules.Pooling(16, pooling_mode=modes if len(modes) > 1 else modes[0])]
    rest += [modules.Normalize()] * normalized
    model = sentence_transformers.SentenceTransformer(modules=[first, *rest], device="cpu").eval()
    tokens = model.tokenize(TEXTS)
    expected = {name: tokens[name].contiguous() for name in ("input_ids", "attention_mask")}
    expected["embeddings"] = torch.from_numpy(model.encode(TEXTS)).contiguous()
    shutil.rmtree(folder, ignore_errors=True)
    model.save(str(folder))
    for name in LEFT_OUT:
        (folder / name).unlink(missing_ok=True)
    safetensors.save_file(expected, folder / "expected.safetensors")


if __name__ == "__main__":
    tyro.cli(main)
