"""Write the reference cases of encoders: tiny random models of texts and images, with PyTorch's outputs and gradients.

    python scripts/make_encoder_fixtures.py                             # all of tests/fixtures/encoders
    python scripts/make_encoder_fixtures.py --only bert_classes --out /tmp/cases

Needs what scripts/make_fixtures.py needs, and writes files of the same form. A case of a text has padded rows:

    input_ids, attention_mask, token_type_ids    texts; and of images
    pixel_values                                 images
    labels                                       of classifiers
    logits, loss                                 forward pass; the loss of a masked LM is that of the tokens themselves,
                                                 of ELECTRA's discriminator the binary cross-entropy
    last_hidden_state, pooler_output             of a model without a head; loss = mean squares of both, halved
    hidden_states.N                              the input of layer N

A case of two towers has texts and as many images, and their contrastive loss:

    pixel_attention_mask, spatial_shapes         which patches of pixel_values are not padding; rows and columns of them
    text_embeds, image_embeds                    of norm 1
    logits_per_image, logits_per_text, loss      forward pass
    text_hidden_states.N, vision_hidden_states.N the input of layer N, and the output of the last
    text_last_hidden_state, vision_last_hidden_state
"""

import importlib
import json
import shutil
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from scripts.fixtures import write_cases

try:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    safetensors: Any = importlib.import_module("safetensors.torch")
    loading: Any = importlib.import_module("transformers.core_model_loading")
except ImportError:
    torch = transformers = safetensors = loading = None


@dataclass(frozen=True)
class Case:
    """A case: its class in transformers, and its config."""

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)


TEXT = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT |= {"max_position_embeddings": 24}
LOCAL = TEXT | {"local_attention": 4, "layer_types": ["full_attention", "sliding_attention"]}
IMAGE = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGE |= {"image_size": 8, "patch_size": 4}
DINOV2 = {key: value for key, value in IMAGE.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
DISTILLED = {"vocab_size": 40, "dim": 16, "hidden_dim": 20, "n_layers": 2, "n_heads": 4, "max_position_embeddings": 24}
RELATIVE = TEXT | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
RELATIVE |= {"position_buckets": 4, "max_relative_positions": 7}
EMBEDDED = TEXT | {"embedding_size": 12}
SHARED = EMBEDDED | {"num_hidden_layers": 4}
THREE = {"num_labels": 3}
T5 = {"vocab_size": 61, "d_model": 20, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4}
T5 |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 16}
END = 39
PAIR = {"text_config": TEXT, "vision_config": IMAGE | {"hidden_size": 12}, "projection_dim": 10}
SIGMOID = {"text_config": TEXT, "vision_config": IMAGE}
PATCHED = {key: value for key, value in IMAGE.items() if key != "image_size"} | {"num_patches": 16}
LAST_IS_RAW = ("CLIPTextModel", "SiglipTextModel")
"""Classes with hidden states that end before the final norm."""
ONE_AS_PADDING = ("Roberta", "Camembert", "MPNet")
CASES = {
    "bert_masked": Case("BertForMaskedLM", TEXT),
    "bert_texts": Case("BertForSequenceClassification", TEXT | THREE),
    "bert_tokens": Case("BertForTokenClassification", TEXT | THREE | {"hidden_act": "relu"}),
    "bert_features": Case("BertModel", TEXT),
    "roberta_masked": Case("RobertaForMaskedLM", TEXT),
    "roberta_texts": Case("RobertaForSequenceClassification", TEXT | THREE | {"type_vocab_size": 1}),
    "xlm_roberta_tokens": Case("XLMRobertaForTokenClassification", TEXT | THREE),
    "modernbert_masked": Case("ModernBertForMaskedLM", LOCAL | {"attention_bias": True, "mlp_bias": True}),
    "modernbert_texts": Case("ModernBertForSequenceClassification", LOCAL | THREE | {"classifier_pooling": "mean"}),
    "modernbert_tokens": Case("ModernBertForTokenClassification", LOCAL | THREE | {"norm_bias": True}),
    "eurobert_masked": Case("EuroBertForMaskedLM", TEXT | {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "eurobert_texts": Case("EuroBertForSequenceClassification", TEXT | THREE),
    "eurobert_means": Case("EuroBertForSequenceClassification", TEXT | THREE | {"classifier_pooling": "mean"}),
    "eurobert_features": Case("EuroBertModel", TEXT),
    "deberta_masked": Case("DebertaV2ForMaskedLM", RELATIVE | {"share_att_key": True, "norm_rel_ebd": "layer_norm"}),
    "deberta_masked_v3": Case("DebertaV2ForMaskedLM", RELATIVE | {"legacy": False, "position_biased_input": True}),
    "deberta_texts": Case(
        "DebertaV2ForSequenceClassification",
        RELATIVE | THREE | {"pos_att_type": ["c2p"], "pooler_hidden_act": "tanh", "type_vocab_size": 2},
    ),
    "deberta_tokens": Case(
        "DebertaV2ForTokenClassification",
        RELATIVE | THREE | {"pos_att_type": ["p2c"], "position_buckets": -1, "max_relative_positions": 5},
    ),
    "deberta_features": Case("DebertaV2Model", TEXT),
    "camembert_masked": Case("CamembertForMaskedLM", TEXT),
    "distilbert_masked": Case("DistilBertForMaskedLM", DISTILLED),
    "distilbert_texts": Case("DistilBertForSequenceClassification", DISTILLED | THREE | {"activation": "relu"}),
    "distilbert_tokens": Case("DistilBertForTokenClassification", DISTILLED | THREE),
    "distilbert_features": Case("DistilBertModel", DISTILLED),
    "nomic_bert_masked": Case("NomicBertForMaskedLM", TEXT),
    "nomic_bert_texts": Case("NomicBertForSequenceClassification", TEXT | THREE | {"head_dim": 6}),
    "nomic_bert_features": Case("NomicBertModel", TEXT),
    "albert_masked": Case("AlbertForMaskedLM", SHARED | {"hidden_act": "relu"}),
    "albert_groups": Case("AlbertForMaskedLM", SHARED | {"num_hidden_groups": 2, "inner_group_num": 2}),
    "albert_texts": Case("AlbertForSequenceClassification", SHARED | THREE | {"num_hidden_groups": 2}),
    "albert_tokens": Case("AlbertForTokenClassification", SHARED | THREE | {"embedding_size": 16}),
    "albert_features": Case("AlbertModel", SHARED),
    "electra_masked": Case("ElectraForMaskedLM", EMBEDDED),
    "electra_replaced": Case("ElectraForPreTraining", EMBEDDED | {"hidden_act": "relu"}),
    "electra_texts": Case("ElectraForSequenceClassification", EMBEDDED | THREE | {"embedding_size": 16}),
    "electra_tokens": Case("ElectraForTokenClassification", EMBEDDED | THREE),
    "electra_features": Case("ElectraModel", EMBEDDED),
    "mpnet_masked": Case("MPNetForMaskedLM", TEXT),
    "mpnet_texts": Case("MPNetForSequenceClassification", TEXT | THREE),
    "mpnet_tokens": Case("MPNetForTokenClassification", TEXT | THREE | {"hidden_act": "relu"}),
    "mpnet_features": Case("MPNetModel", TEXT),
    "roformer_masked": Case("RoFormerForMaskedLM", TEXT),
    "roformer_texts": Case("RoFormerForSequenceClassification", TEXT | THREE | {"embedding_size": 16}),
    "roformer_tokens": Case("RoFormerForTokenClassification", TEXT | THREE | {"hidden_act": "relu"}),
    "roformer_features": Case("RoFormerModel", TEXT),
    "roberta_prelayernorm_masked": Case("RobertaPreLayerNormForMaskedLM", TEXT),
    "roberta_prelayernorm_texts": Case("RobertaPreLayerNormForSequenceClassification", TEXT | THREE),
    "roberta_prelayernorm_features": Case("RobertaPreLayerNormModel", TEXT),
    "xlm_roberta_xl_masked": Case("XLMRobertaXLForMaskedLM", TEXT),
    "xlm_roberta_xl_texts": Case("XLMRobertaXLForSequenceClassification", TEXT | THREE),
    "xlm_roberta_xl_features": Case("XLMRobertaXLModel", TEXT),
    "t5_features": Case("T5EncoderModel", T5),
    "umt5_features": Case("UMT5EncoderModel", T5 | {"feed_forward_proj": "gated-gelu"}),
    "vit_classes": Case("ViTForImageClassification", IMAGE | THREE),
    "vit_features": Case("ViTModel", IMAGE),
    "dinov2_classes": Case("Dinov2ForImageClassification", DINOV2 | THREE),
    "dinov3_features": Case("DINOv3ViTModel", IMAGE | {"num_register_tokens": 2}),
    "siglip_features": Case("SiglipVisionModel", IMAGE),
    "siglip_texts": Case("SiglipTextModel", TEXT | {"max_position_embeddings": 9, "projection_size": 12}),
    "siglip_pairs": Case("SiglipModel", SIGMOID),
    "siglip2_pairs": Case("Siglip2Model", SIGMOID | {"vision_config": PATCHED}),
    "clip_texts": Case("CLIPTextModel", TEXT | {"eos_token_id": END}),
    "clip_images": Case("CLIPVisionModel", IMAGE),
    "clip_pairs": Case("CLIPModel", PAIR | {"text_config": TEXT | {"eos_token_id": 2}}),
    "chinese_clip_pairs": Case("ChineseCLIPModel", PAIR),
}


def main(*, out: Path = Path(__file__).parents[1] / "tests/fixtures/encoders", only: tuple[str, ...] = ()) -> None:
    """Write the cases; print the size of each.

    Args:
        out: Folder for the cases, one subfolder each.
        only: Names of cases. By default all.
    """
    if transformers is None:
        raise SystemExit("This needs PyTorch and transformers: pip install torch==2.13.0 transformers==5.23.0")
    write_cases(make, only or CASES, out, torch, transformers)


def make(name: str, folder: Path) -> str:
    """Write one case; return its class in transformers."""
    case, seed = CASES[name], zlib.crc32(name.encode()) % 100_000
    random = np.random.default_rng(seed)
    shutil.rmtree(folder, ignore_errors=True)
    model = build(case, random, seed)
    model.save_pretrained(folder)
    if "text_config" in case.config:
        return make_pairs(name, folder, model, random, seed)
    inputs = draw_images(random) if "pixel_values" in model.main_input_name else draw_texts(case, random)
    result = model(**inputs, output_hidden_states=True)
    logits, inputs = result.get("logits"), {name: value.contiguous() for name, value in inputs.items()}
    if logits is None:
        outputs = {key: result[key] for key in ("last_hidden_state", "pooler_output") if result.get(key) is not None}
        real = inputs.get("attention_mask", torch.ones(outputs["last_hidden_state"].shape[:2]))
        squares = {key: x.square() for key, x in outputs.items()}
        squares["last_hidden_state"] = squares["last_hidden_state"] * real[..., None]
        loss: Any = sum(x.mean() for x in squares.values()) / 2
    else:
        is_masked, is_binary = (case.architecture.endswith(head) for head in ("MaskedLM", "ForPreTraining"))
        classes, rows = (2, tuple(logits.shape)) if is_binary else (3, tuple(logits.shape[:-1]))
        labels = inputs["input_ids"] if is_masked else torch.from_numpy(random.integers(0, classes, rows))
        if labels.ndim == 2:
            labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
        if is_binary:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(
                logits[labels >= 0], labels[labels >= 0].float()
            )
        else:
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        outputs = {"logits": logits, "labels": labels}
    loss.backward()
    expected = inputs | outputs | {"loss": loss}
    states = result.hidden_states[:-1] if case.architecture in LAST_IS_RAW else result.hidden_states
    expected |= {f"hidden_states.{n}": x for n, x in enumerate(states)}
    write_results(name, folder, model, seed, expected)
    return case.architecture


def make_pairs(name: str, folder: Path, model: Any, random: np.random.Generator, seed: int) -> str:
    """Write the case of two towers; return its class in transformers."""
    case = CASES[name]
    texts = Case(case.architecture, case.config["text_config"])
    inputs = draw_texts(texts, random)
    if "num_patches" in case.config["vision_config"]:
        mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0]])
        pixels = torch.from_numpy(random.standard_normal((2, 6, 48), dtype=np.float32)) * mask[..., None]
        shapes = torch.tensor([[2, 3], [5, 1]])
        inputs |= {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    else:
        inputs |= draw_images(random)
    result = model(**inputs, return_loss=True, output_hidden_states=True)
    result.loss.backward()
    outputs = ("text_embeds", "image_embeds", "logits_per_image", "logits_per_text", "loss")
    expected = inputs | {key: result[key] for key in outputs}
    for prefix, tower in (("text", result.text_model_output), ("vision", result.vision_model_output)):
        expected[f"{prefix}_last_hidden_state"] = tower.last_hidden_state
        expected |= {f"{prefix}_hidden_states.{n}": x for n, x in enumerate(tower.hidden_states)}
    write_results(name, folder, model, seed, expected)
    return case.architecture


def write_results(name: str, folder: Path, model: Any, seed: int, expected: dict[str, Any]) -> None:
    """Write results, and the norms of the gradients that the model's parameters have."""
    case = CASES[name]
    gradients = {key: weight.grad for key, weight in model.named_parameters() if weight.grad is not None}
    for tied, kept in (model._tied_weights_keys or {}).items():  # CamemBERT's class has its head before the embedding
        if tied in gradients and kept not in gradients:
            gradients[kept] = gradients.pop(tied)
    gradients = loading.revert_weight_conversion(model, gradients)  # as files name them
    norms = {key: float(gradient.double().norm()) for key, gradient in gradients.items()}
    tensors = {key: x.detach().clone().contiguous() for key, x in expected.items()}
    safetensors.save_file(tensors, folder / "expected.safetensors")
    meta = {"name": name, "architecture": case.architecture, "seed": seed, "grad_norm": dict(sorted(norms.items()))}
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")


def build(case: Case, random: np.random.Generator, seed: int) -> Any:
    """Build a model with random weights, of norms and biases too."""
    torch.manual_seed(seed)
    kind = getattr(transformers, case.architecture)
    marks = {} if {"image_size", "text_config"} & case.config.keys() else {"pad_token_id": find_padding(case)}
    model = kind(kind.config_class(**case.config, **marks)).eval()
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if not weight.requires_grad:  # a table that the class computes
                continue
            draw = torch.from_numpy(random.standard_normal(tuple(weight.shape), dtype=np.float32))
            weight.add_(0.2 * draw) if weight.ndim == 1 else weight.copy_(0.3 * draw)
        if case.architecture == "ChineseCLIPModel":
            model.text_model.embeddings.word_embeddings.weight[0] = 0  # as its class does where it reads a file
    return model


def find_padding(case: Case) -> int:
    """Return the padding token, after whose number RoBERTa's positions begin."""
    return int(any(name in case.architecture for name in ONE_AS_PADDING))


def draw_texts(case: Case, random: np.random.Generator) -> dict[str, Any]:
    """Return a row without padding and one with padding on the right; of ALBERT, BERT, ELECTRA, Nomic Embed and
    RoFormer, the second half is of type 1. CLIP's texts close with the end token, and SigLIP's are not masked."""
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    ids = torch.from_numpy(random.integers(3, case.config["vocab_size"], (2, 9)))
    ids = ids.masked_fill(mask == 0, find_padding(case))
    if case.architecture.startswith("CLIP"):
        ids = ids.clamp(max=END - 1)
        ids[0, 8] = ids[1, 5] = END
    if case.architecture.startswith("Siglip"):
        return {"input_ids": ids}
    typed = case.architecture.startswith(("Albert", "Bert", "NomicBert", "Electra", "ChineseCLIP", "RoFormer"))
    types = {"token_type_ids": (torch.arange(9) > 3).long().expand(2, 9)} if typed else {}
    return {"input_ids": ids, "attention_mask": mask, **types}


def draw_images(random: np.random.Generator) -> dict[str, Any]:
    return {"pixel_values": torch.from_numpy(random.standard_normal((2, 3, 8, 8), dtype=np.float32))}


if __name__ == "__main__":
    tyro.cli(main)
