"""MkDocs hook: rank guides before the API in the site's search, mend the search, and ask the built index for its words.

lunr, which the theme searches with, merges the states of its automaton by a string that joins the letter of each edge
to the number of the state that it leads to. Where a word has digits, two states may have one string: lunr then drops
words, and a query that meets them raises. A comma between them keeps the states apart.
"""

import itertools
import json
import logging
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

GUIDES = 3.0
API = 0.5
MIXED = (
    *("families.md", "fork.md", "glossary.md", "gpu.md", "other-libraries.md", "performance.md"),
    "second-derivatives.md",
    *("tutorials/from-flax.md", "tutorials/from-pytorch.md", "tutorials/from-pytorch-2.md"),
    "tutorials/from-pytorch-3.md",
)
"""Pages that hold a little of everything."""
BOOSTS: dict[str, float] = {**dict.fromkeys(MIXED, 1.0), "api/zoo.models.hf.families.md": 0.25}
"""Boosts by page. Of the others, the API has `API`, and a guide `GUIDES`."""
TAGS: dict[str, tuple[str, ...]] = {
    "adapters.md": ("LoRA", "DoRA", "QLoRA"),
    "attention.md": ("flash attention",),
    "chat-model.md": ("chat model", "end to end"),
    "checkpoints.md": ("save model",),
    "classify.md": ("classification", "reward model"),
    "models-of-2026.md": ("DeepSeek-V4", "Qwen4", "Hy4", "LongCat", "Engram", "hyper-connections"),
    "determinism.md": ("determinism", "reproducible", "seed"),
    "diffusion.md": ("LLaDA", "masked diffusion", "block diffusion"),
    "diloco.md": ("DiLoCo", "local SGD", "federated"),
    "embeddings.md": ("semantic search", "sentence-transformers", "retrieval"),
    "ensembles.md": ("ensemble", "hyperparameter sweep", "vmap"),
    "evaluate.md": ("perplexity", "benchmark", "MMLU"),
    "export.md": ("serve", "vLLM"),
    "first-hour.md": ("install", "quickstart"),
    "generate.md": ("sampling", "top-p", "temperature", "streaming", "system prompt", "KV cache"),
    "long-context.md": ("RoPE scaling", "ring attention", "long sequences"),
    "look-inside.md": ("interpretability", "activation patching"),
    "optimizers.md": ("learning rate", "warmup", "weight decay"),
    "pipelines.md": ("pipeline parallelism",),
    "platforms/one_box.md": ("multi-GPU", "Docker"),
    "precision.md": ("mixed precision", "bfloat16"),
    "preferences.md": ("RLHF",),
    "pretrain.md": ("pretraining", "scaling"),
    "profile.md": ("MFU", "Perfetto", "profiler"),
    "qat.md": ("QAT", "straight-through"),
    "quantized.md": ("quantization", "bitsandbytes", "GPTQ"),
    "recurrences.md": ("Mamba", "delta rule", "linear attention"),
    "reinforcement.md": ("RLHF", "GRPO", "PPO"),
    "scaling.md": ("scaling laws", "isoFLOP", "Chinchilla"),
    "tokenizer.md": ("BPE", "vocabulary"),
    "train.md": ("early stopping", "epochs", "gradient clipping", "wandb", "TensorBoard"),
    "troubleshooting.md": ("debugging", "recompilation", "NaN", "slow"),
    "tutorials/align-images-and-texts.md": ("CLIP", "OpenCLIP", "CLIP model", "SigLIP"),
    "tutorials/checkpoints.md": ("load model",),
    "tutorials/encoders.md": ("BERT", "fill-mask", "token classification"),
    "tutorials/mamba-and-hybrids.md": ("hybrid", "state space model"),
    "tutorials/parallelism-by-hand.md": ("psum", "tensor parallelism", "FSDP"),
    "tutorials/translate.md": ("Whisper", "T5"),
    "tutorials/transformer.md": ("from scratch",),
    "vit.md": ("ViT", "DINO", "image classification"),
    "write-a-kernel.md": ("Pallas", "custom kernel"),
    "your-data.md": ("dataset", "packing", "chat template"),
}
"""Words by which readers look for a page, and which its title or its headings lack. Results show them."""
FREQUENT = 500
"""Words that a build asks for, the most frequent ones of the site."""
PROGRAM = Path(__file__).with_name("ask_search.js")
WORKERS = "assets/javascripts/workers/search.*.js"
FAULT = re.compile(r"\b(\w)=\1\+(\w)\+(\w)\.id\b")
"""Where lunr's `TokenSet.prototype.toString` joins a letter to a number, as it is minified."""

log = logging.getLogger("mkdocs.hooks.site_search")


def find_boost(path: str) -> float:
    """Return the boost of a page, by its path below docs/."""
    if path in BOOSTS:
        return BOOSTS[path]
    return API if path.startswith("api/") else GUIDES


def mend_worker(script: str) -> str:
    """Separate the edges in the string by which lunr compares two states.

    **Raises** `ValueError` if the script does not have it exactly once.
    """
    mended, count = FAULT.subn(r'\1=\1+\2+\3.id+","', script)
    if count != 1:
        raise ValueError(f"lunr's TokenSet.toString was found {count} times in the theme's worker")
    return mended


def list_words(site: Path, count: int = FREQUENT) -> list[str]:
    """Return the most frequent words of a built site, each letter and digit, and pairs of the most frequent words."""
    docs = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    texts = (re.sub(r"<[^>]+>", " ", f"{doc['title']} {doc['text']}") for doc in docs)
    counts = Counter(word for text in texts for word in re.findall(r"[a-z0-9][a-z0-9_]*", text.lower()))
    words = [word for word, _ in counts.most_common(count)]
    pairs = [f"{first} {second}" for first, second in itertools.pairwise(words[:101])]
    return [*dict.fromkeys([*words, *"abcdefghijklmnopqrstuvwxyz0123456789"]), *pairs]


def ask(site: Path, words: Iterable[str]) -> list[dict[str, Any]]:
    """Ask the search of a built site for `words`, by Node.

    Each answer has the `words`, the pages or places that were `found`, best first, and `warnings` of the search.

    **Raises** `FileNotFoundError` without Node.
    """
    node = shutil.which("node")
    if node is None:
        raise FileNotFoundError("Node is needed to ask the site's search: node is not on the path")
    done = subprocess.run(
        [node, str(PROGRAM), str(site)], input=json.dumps(list(words)), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def find_faults(site: Path) -> Iterator[str]:
    """Yield a line for each frequent word of a built site that its search fails on."""
    for answer in ask(site, list_words(site)):
        if answer["warnings"]:
            yield f"the search fails on {answer['words']!r}: {' '.join(answer['warnings'])}"


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """Give a page its boost and its tags, unless its front matter has some."""
    page.meta["search"] = {"boost": find_boost(page.file.src_uri)} | page.meta.get("search", {})
    page.meta.setdefault("tags", list(TAGS.get(page.file.src_uri, ())))
    return markdown


def on_post_build(config, **_) -> None:
    """Mend the theme's worker, and warn of words that the search fails on, which fails a strict build."""
    site = Path(config["site_dir"])
    (worker,) = site.glob(WORKERS)
    worker.write_text(mend_worker(worker.read_text(encoding="utf-8")), encoding="utf-8")
    try:
        for line in find_faults(site):
            log.warning("%s", line)
    except FileNotFoundError as missing:
        log.info("%s", missing)
