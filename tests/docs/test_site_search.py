"""The site's search: guides come before the API, and no word breaks it."""

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import browse_site, site_search

material = pytest.importorskip("material")

ROOT = Path(__file__).parents[2]
THEME = Path(material.__file__).parent / "templates"
FIRST = {
    "early stopping": "train.html",
    "epochs": "train.html",
    "gradient accumulation": "train.html",
    "gradient clipping": "train.html",
    "dropout": "train.html",
    "wandb": "train.html",
    "tensorboard": "train.html",
    "tokenizer": "tokenizer.html",
    "BPE": "tokenizer.html",
    "dataset": "your-data.html",
    "packing": "your-data.html",
    "parquet": "your-data.html",
    "s3": "your-data.html",
    "chat template": "your-data.html",
    "sft": "sft.html",
    "lora": "adapters.html",
    "DoRA": "adapters.html",
    "QLoRA": "adapters.html",
    "PEFT": "tutorials/from-peft.html",
    "DPO": "preferences.html",
    "KTO": "preferences.html",
    "RLHF": "preferences.html",
    "GRPO": "reinforcement.html",
    "rewards": "reinforcement.html",
    "distillation": "distill.html",
    "generate": "generate.html",
    "system prompt": "generate.html",
    "temperature": "generate.html",
    "top-p": "generate.html",
    "sampling": "generate.html",
    "speculative decoding": "generate.html",
    "streaming": "generate.html",
    "KV cache": "generate.html",
    "semantic search": "embeddings.html",
    "sentence-transformers": "embeddings.html",
    "classification": "classify.html",
    "evaluate": "evaluate.html",
    "perplexity": "evaluate.html",
    "MMLU": "evaluate.html",
    "quantization": "quantized.html",
    "GPTQ": "quantized.html",
    "checkpoint": "checkpoints.html",
    "save model": "checkpoints.html",
    "load model": "tutorials/checkpoints.html",
    "DLPack": "arrays.html",
    "chat model": "chat-model.html",
    "pretraining": "pretrain.html",
    "BERT": "tutorials/encoders.html",
    "fill-mask": "tutorials/encoders.html",
    "ViT": "vit.html",
    "DINO": "vit.html",
    "CLIP": "tutorials/align-images-and-texts.html",
    "whisper": "tutorials/translate.html",
    "translation": "tutorials/translate.html",
    "mixture of experts": "moe.html",
    "diffusion": "diffusion.html",
    "LLaDA": "diffusion.html",
    "scaling laws": "scaling.html",
    "isoFLOP": "scaling.html",
    "DiLoCo": "diloco.html",
    "local SGD": "diloco.html",
    "QAT": "qat.html",
    "long context": "long-context.html",
    "RoPE": "long-context.html",
    "ring attention": "long-context.html",
    "learning rate": "optimizers.html",
    "warmup": "optimizers.html",
    "weight decay": "optimizers.html",
    "muon": "optimizers.html",
    "batch size": "choose_mesh.html",
    "bfloat16": "precision.html",
    "fp8": "precision.html",
    "resume": "resume.html",
    "ensemble": "ensembles.html",
    "hyperparameter sweep": "ensembles.html",
    "mamba": "recurrences.html",
    "delta rule": "recurrences.html",
    "hybrid": "tutorials/mamba-and-hybrids.html",
    "reproduce": "tutorials/reproduce-a-paper.html",
    "flash attention": "attention.html",
    "pallas": "write-a-kernel.html",
    "kernel": "write-a-kernel.html",
    "interpretability": "look-inside.html",
    "sparse autoencoder": "look-inside.html",
    "Hessian": "second-derivatives.html",
    "StableHLO": "read-a-program.html",
    "XLA flags": "read-a-program.html",
    "MFU": "profile.html",
    "Perfetto": "profile.html",
    "profiler": "profile.html",
    "determinism": "determinism.html",
    "seed": "determinism.html",
    "NaN": "troubleshooting.html",
    "out of memory": "troubleshooting.html",
    "recompilation": "troubleshooting.html",
    "hangs": "troubleshooting.html",
    "debugging": "troubleshooting.html",
    "psum": "tutorials/parallelism-by-hand.html",
    "tensor parallelism": "tutorials/parallelism-by-hand.html",
    "fsdp": "parallelism.html",
    "DeepSpeed": "parallelism.html",
    "pipeline": "pipelines.html",
    "pipeline parallelism": "pipelines.html",
    "slurm": "platforms/slurm.html",
    "kubernetes": "platforms/kubernetes.html",
    "skypilot": "platforms/skypilot.html",
    "TPU": "platforms/cloud_tpu.html",
    "docker": "platforms/one_box.html",
    "multi-gpu": "platforms/one_box.html",
    "jax.export": "export.html",
    "ONNX": "export.html",
    "vllm": "export.html",
    "install": "first-hour.html",
    "hooks": "tutorials/from-pytorch-2.html",
    "BatchNorm": "tutorials/from-pytorch-2.html",
    "pmap": "tutorials/from-pytorch-3.html",
    "GSPMD": "tutorials/from-pytorch-3.html",
    "Flax": "tutorials/from-flax.html",
    "Haiku": "tutorials/from-flax.html",
    "Pax": "tutorials/from-flax.html",
    "TransformerLens": "look-inside.html",
    "litgpt": "other-libraries.html",
    "unsloth": "other-libraries.html",
    "Tunix": "other-libraries.html",
    "size": None,
    "cuda": None,
}
"""The page that the search puts first, or none in particular, by what a reader types."""
DATA = ("sft", "chat", "instruction", "jsonl", "dataset", "finetune", "huggingface")
"""Words by which a reader finds the pages on data and supervised fine-tuning."""

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="Node runs the theme's worker")


@pytest.fixture
def site(tmp_path):
    """A site of one page with numbers for which lunr's automaton mixes up its states; few sets of numbers do."""
    worker = next(THEME.glob(site_search.WORKERS))
    folder = tmp_path / "assets" / "javascripts" / "workers"
    folder.mkdir(parents=True)
    shutil.copy(worker, folder)
    draw = random.Random(7)
    text = " ".join(str(draw.randrange(10**6)) for _ in range(2000))
    docs = [{"location": "page.html", "title": "Numbers", "text": f"<p>{text}</p>"}]
    fields = {"title": {"boost": 10}, "text": {"boost": 1}, "tags": {"boost": 1}}
    config = {"lang": ["en"], "separator": r"[\s]+", "pipeline": ["stopWordFilter"], "fields": fields}
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search_index.json").write_text(json.dumps({"config": config, "docs": docs}))
    return tmp_path


@needs_node
def test_mended_search_finds_words_with_digits(site):
    assert list(site_search.find_faults(site)), "lunr needs no mending any more"
    (worker,) = site.glob(site_search.WORKERS)
    worker.write_text(site_search.mend_worker(worker.read_text(encoding="utf-8")), encoding="utf-8")
    assert list(site_search.find_faults(site)) == []
    answers = site_search.ask(site, ["7", "76", "763", "8", "87"])
    assert [answer["found"] for answer in answers] == [["page.html"]] * 5


def test_mend_refuses_a_worker_of_another_form():
    with pytest.raises(ValueError, match="found 0 times"):
        site_search.mend_worker("e=e+s")


def test_front_matter_overrides_boosts():
    def read(path, **meta):
        page = SimpleNamespace(meta=meta, file=SimpleNamespace(src_uri=path))
        assert site_search.on_page_markdown("text", page=page) == "text"
        return page.meta["search"]

    assert read("api/zoo.md")["boost"] < read("glossary.md")["boost"] < read("train.md")["boost"]
    assert read("train.md", search={"boost": 7}) == {"boost": 7}
    assert read("tree.md", search={"exclude": True})["exclude"]


def test_pages_get_their_tags():
    page = SimpleNamespace(meta={}, file=SimpleNamespace(src_uri="generate.md"))
    site_search.on_page_markdown("text", page=page)
    assert "system prompt" in page.meta["tags"]
    assert [name for name in site_search.TAGS if not (ROOT / "docs" / name).exists()] == []


def test_words_are_those_of_the_index(site):
    words = site_search.list_words(site, count=200)
    assert {"a", "0", "z", "9"} <= set(words)
    assert "p" in words and "<p>000" not in words
    assert sum(" " in word for word in words) == 100


def ask(site, words):
    """Ask by Node, or by a browser where there is no Node."""
    if shutil.which("node"):
        return {answer["words"]: answer["found"] for answer in site_search.ask(site, words)}
    if browse_site.find_chromium() is None:
        pytest.skip("neither Node nor Chromium")
    answers = browse_site.browse(site, widths=(), search=words)
    return {answer["words"]: answer["found"] or [] for answer in answers}


@pytest.mark.slow
def test_search_of_the_built_site(built):
    assert not shutil.which("node") or list(site_search.find_faults(built)) == []
    found = ask(built, list(FIRST))
    assert [words for words in FIRST if not found[words]] == []
    first = {words: places[0].partition("#")[0].partition("?")[0] for words, places in found.items()}
    found = ask(built, DATA)
    pages = ("your-data.html", "sft.html")
    missed = [word for word in DATA if not any(place.startswith(pages) for place in found[word][:4])]
    assert missed == [], {word: found[word][:4] for word in missed}
    assert {words: first[words] for words, page in FIRST.items() if page} == {k: v for k, v in FIRST.items() if v}
