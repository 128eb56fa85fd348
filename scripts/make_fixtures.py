"""Write the reference cases of the tests: tiny random models with PyTorch's outputs and gradients.

    python scripts/make_fixtures.py                                       # all of tests/fixtures/models
    python scripts/make_fixtures.py --only gemma gpt2 --out /tmp/cases    # some cases, to another folder
    python scripts/make_fixtures.py --only phi3 --out docs/fixtures       # the case of the page on porting

Needs `pip install -e . torch==2.13.0 transformers==5.23.0 safetensors==0.8.0 numpy==2.4.6` and Python 3.11, which wrote
the committed files on one CPU. The same versions on the same CPU write the same bytes. Cases from `exaone` on were
written with transformers 5.24.0; the meta.json of a case names its versions. Cases with "format": "fla" in theirs are
of flash-linear-attention 0.6.0, its kernels replaced by plain functions, and not written by this script; nor is
`mimo`, a model of Qwen2's class with a module of multi-token prediction, or the folder encoder_decoders.

A case has config.json as transformers writes it now; config_hub.json as most repositories spell it, without keys that
equal the class's defaults; the weights; meta.json, with the norm of every gradient and checks of transformers against
itself; and expected.safetensors, in float32 unless a name says otherwise:

    input_ids, logits, loss                      forward pass, and the next-token loss
    hidden_states.N                              the input of layer N; the last one comes after the final norm. Mamba
                                                 and RWKV: the output of layer N, and then the last one normed
    router_logits.N                              expert scores of the N-th layer with a router
    aux_loss, loss_with_aux                      load balancing loss of the routers, and the loss that includes it
    grad.NAME                                    some gradients of the loss, named as transformers saves weights
    padleft.*, padright.*                        the same rows, shortened and padded: real tokens keep their logits
    generate.prompt, .tokens, .logits            greedy decoding, by a full forward pass per token
    generate_padleft.*                           the same, shortened and padded; tokens are those of each row alone
    bfloat16.logits, bfloat16.hidden_states.N    forward pass with bfloat16 weights and activations, cast to float32
"""

import contextlib
import importlib
import inspect
import json
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from scripts.fixture_cases import CASES, Case
from scripts.fixtures import write_cases

try:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    safetensors: Any = importlib.import_module("safetensors.torch")
    loading: Any = importlib.import_module("transformers.core_model_loading")
except ImportError:
    torch = transformers = safetensors = loading = None

PAD, FIRST = 0, 3  # real tokens start after padding, beginning and end of sequence
LENGTH, PADDING = 10, (4, 2)
PROMPT, PROMPT_PADDING, NEW = 9, (4, 0), 8
MARGIN, NOISE = 0.02, 1e-4  # the margin of greedy tokens exceeds any rounding
# Gradients to save: the first layer's queries with bias and norm, the final norm, and routers and first experts.
FEW = re.compile(
    r"\.0\..*(q_proj|conv\.in_proj|mlstm_layer\.q\.|igate|q_a_proj|kv_b_proj|qkv_proj|query_key_value|c_attn|q_norm|sinks)"
    r"|\.0\..*(A_log|conv1d|rg_lru|lambda|dt_proj|time_decay|time_mix_key)|^\w+\.(norm|ln_f|final_layer_?norm|norm_f|ln_out|embedding_norm|out_norm)\.|\.gate\.weight|\.router\.|\.experts\.0\.(down_proj|w2)\."
)


def as_published(tensors: dict[str, Any]) -> dict[str, Any]:
    """Rename GPT-2's weights as first published: without a prefix, and with the causal mask."""
    positions = len(tensors["transformer.wpe.weight"])
    mask = torch.ones(1, 1, positions, positions, dtype=torch.bfloat16).tril()
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | {"h.0.attn.bias": mask}


def mxfp4(weights: Any) -> tuple[Any, Any]:
    """Quantize weights (experts, in, out) to MXFP4 codes (experts, out, in / 32, 32) and block exponents."""
    blocks = weights.float().transpose(-1, -2).unflatten(-1, (-1, 32))
    exponents = blocks.abs().amax(-1, keepdim=True).log2().floor() - 2
    codes = ((blocks / 2**exponents).abs()[..., None] - torch.tensor(GRID)).abs().argmin(-1)
    return codes + 8 * blocks.signbit(), exponents


def dequantize_mxfp4(codes: Any, exponents: Any) -> Any:
    """Dequantize MXFP4 codes to (experts, in, out)."""
    numbers = torch.tensor([*GRID, *(-x for x in GRID)])[codes] * 2**exponents
    return numbers.flatten(-2).transpose(-1, -2)


def pack(folder: Path, norms: dict[str, float]) -> dict[str, float]:
    """Store the experts of a case as MXFP4, like GPT-OSS. Return `norms` under the names of the packed blocks."""
    tensors = safetensors.load_file(folder / "model.safetensors")
    names = [name for name in tensors if EXPERTS.search(name)]
    for name in names:
        codes, exponents = mxfp4(weights := tensors.pop(name))
        if not torch.equal(dequantize_mxfp4(codes, exponents).to(weights.dtype), weights):
            raise RuntimeError(f"{name} has numbers that are no MXFP4")
        tensors[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        tensors[f"{name}_scales"] = (exponents[..., 0] + 127).to(torch.uint8)
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for file, indent in (("config.json", 2), ("config_hub.json", 1)):
        config = json.loads((folder / file).read_text()) | {"quantization_config": QUANTIZED}
        (folder / file).write_text(json.dumps(config, indent=indent) + "\n")
    return {f"{name}_blocks" if name in names else name: norm for name, norm in norms.items()}


GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EXPERTS = re.compile(r"\.experts\.(gate_up|down)_proj$")
LEFT_OUT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
QUANTIZED = {"modules_to_not_convert": LEFT_OUT, "quant_method": "mxfp4"}


PAGES = ("phi3",)  # of the documentation, made only when named


def main(*, out: Path = Path(__file__).parents[1] / "tests/fixtures/models", only: tuple[str, ...] = ()) -> None:
    """Write the cases; print the size of each and the checks of transformers against itself.

    Args:
        out: Folder for the cases, one subfolder each.
        only: Names of cases. By default all but those of the documentation.
    """
    if transformers is None:
        raise SystemExit("This needs PyTorch and transformers: pip install torch==2.13.0 transformers==5.23.0")
    write_cases(make, only or [name for name in CASES if name not in PAGES], out, torch, transformers)


def make(name: str, folder: Path) -> dict[str, Any]:
    """Write one case, with the first seed whose greedy tokens have a clear margin; return transformers' self-checks."""
    case = CASES[name]
    for seed in range(first := zlib.crc32(name.encode()) % 100_000, first + 50):
        parameters = save(case, seed, folder)
        expected, norms, checks = compute(folder, seed)
        if min(value for check, value in checks.items() if check.endswith("margin")) >= MARGIN:
            break
    else:
        raise RuntimeError(f"{name}: no seed makes greedy tokens lead")
    config = json.loads((folder / "config.json").read_text())
    hub = to_hub_config(config, case)
    with torch.no_grad():
        logits = load(folder, config=parse(hub))(input_ids=expected["input_ids"], use_cache=False).logits
    checks |= {"hub_config": "ok", "hub_config_logits": distance(logits, expected["logits"])}
    held = {check: value for check, value in checks.items() if not check.endswith(case.amiss)}
    apart = any(value > NOISE for check, value in held.items() if "_vs_" in check)
    if apart or checks["hub_config_logits"] or any(value is False for value in held.values()):
        raise RuntimeError(f"{name}: transformers disagrees with itself: {checks}")

    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    meta: dict[str, Any] = {"name": name, "family": case.family, "model_type": case.family}
    meta |= {"kind": "causal", "note": case.note}
    meta |= {"architecture": config["architectures"][0], "seed": seed, "parameters": parameters}
    meta |= {"tied": config["tie_word_embeddings"], "hidden_states": sum(key.startswith("hidden") for key in expected)}
    meta |= {"versions": versions | {"cpu": torch.backends.cpu.get_cpu_capability()}}
    if case.unused:
        norms = {key: norm for key, norm in norms.items() if not re.search(case.unused, key)}
    meta |= {"grad_norm": {key: float(f"{norm:.8g}") for key, norm in sorted(norms.items())}, "checks": checks}
    safetensors.save_file(expected, folder / "expected.safetensors", metadata={"format": "pt"})
    (folder / "config_hub.json").write_text(json.dumps(hub, indent=1) + "\n")
    if case.packed:
        meta["grad_norm"] = pack(folder, meta["grad_norm"])
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    return checks


def save(case: Case, seed: int, folder: Path) -> int:
    """Save a random checkpoint by transformers; return its number of parameters."""
    shutil.rmtree(folder, ignore_errors=True)
    marks = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": PAD}
    config = transformers.AutoConfig.for_model(case.family, **case.config, **marks)
    for epsilon in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"):
        if getattr(config, epsilon, None) is not None:
            setattr(config, epsilon, 2e-3)  # large enough that another one is noticed
    torch.manual_seed(seed)  # sinks start at random, and are moved from there
    model = find_class(config)._from_config(config, dtype=torch.float32)
    embeddings = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    random = np.random.default_rng(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            draw = torch.from_numpy(random.standard_normal(tuple(weight.shape), dtype=np.float32))
            if weight.ndim == 1:
                weight.add_(0.2 * draw)  # to the first value, so that no norm is 1 and no bias 0
            else:
                weight.copy_((0.3 if id(weight) in embeddings else 1.2 * config.hidden_size**-0.5) * draw)
            if case.packed and EXPERTS.search(name):
                weight.copy_(dequantize_mxfp4(*mxfp4(weight)))
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "feed_forward.expert_bias")):
                draw = random.standard_normal(tuple(buffer.shape), dtype=np.float32)
                buffer.add_(0.2 * torch.from_numpy(draw))
            if name.endswith("tid2eid"):  # the experts of each token
                draws = [random.permutation(config.n_routed_experts)[: buffer.shape[1]] for _ in buffer]
                buffer.copy_(torch.from_numpy(np.stack(draws)))
    model.to(getattr(torch, case.dtype)).save_pretrained(folder, max_shard_size=case.shards)
    (folder / "generation_config.json").unlink()
    if case.as_published:
        path = folder / "model.safetensors"
        safetensors.save_file(as_published(safetensors.load_file(path)), path, metadata={"format": "pt"})
    return model.num_parameters()


def load(folder: Path, dtype: str = "float32", config: Any = None) -> Any:
    options = {"dtype": getattr(torch, dtype), "config": config}
    options |= {"attn_implementation": "eager", "experts_implementation": "eager"}
    kind = find_class(transformers.AutoConfig.from_pretrained(folder))
    return kind.from_pretrained(folder, **options).eval()


def find_class(config: Any) -> Any:
    """Return the class of causal language models for a config; the automatic one does not list Mistral 4."""
    listed = transformers.AutoModelForCausalLM._model_mapping
    if type(config) in listed:
        return listed[type(config)]
    return getattr(transformers, type(config).__name__.replace("Config", "ForCausalLM"))


def compute(folder: Path, seed: int) -> tuple[dict[str, Any], dict[str, float], dict[str, Any]]:
    """Compute expected outputs, norms of gradients, and checks of transformers against itself, from a folder."""
    model = load(folder)
    random = np.random.default_rng(seed)
    ids = torch.from_numpy(random.integers(FIRST, model.config.vocab_size, (2, LENGTH)))
    result = model(input_ids=ids, labels=ids, use_cache=False, output_hidden_states=True)
    result.loss.backward()
    logits = result.logits.detach()
    expected = {"input_ids": ids, "logits": logits, "loss": result.loss}
    expected |= {f"hidden_states.{n}": hidden for n, hidden in enumerate(result.hidden_states)}
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    gradients = loading.revert_weight_conversion(model, gradients)  # as files name them
    expected |= {f"grad.{name}": gradient for name, gradient in gradients.items() if FEW.search(name)}

    checks: dict[str, Any] = {}
    with torch.no_grad():
        has_experts = getattr(model.config, "num_local_experts", None) != 0  # Granite 4 may have none
        if hasattr(model.config, "output_router_logits") and has_experts:
            routed = model(input_ids=ids, labels=ids, use_cache=False, output_router_logits=True)
            expected |= {f"router_logits.{n}": logits for n, logits in enumerate(routed.router_logits)}
            # With a selection bias, transformers counts the top experts without the bias, not those used.
            biased = any("correction_bias" in name for name in model.state_dict())
            if getattr(routed, "aux_loss", None) is not None and not biased:
                expected |= {"aux_loss": routed.aux_loss, "loss_with_aux": routed.loss}
        unpadded = logits[pad_rows(ids, PADDING, "right")["attention_mask"].bool()]
        for side in ("left", "right"):
            inputs = pad_rows(ids, PADDING, side)
            rows = model(**drop_unknown_inputs(model, inputs), use_cache=False).logits[inputs["attention_mask"].bool()]
            checks[f"pad{side}_vs_unpadded"] = distance(rows, unpadded)
            expected |= {f"pad{side}.{name}": value for name, value in inputs.items()}

        for kind, padding in {"generate": (0, 0), "generate_padleft": PROMPT_PADDING}.items():
            inputs, steps, found = generate_greedy(model, ids[:, :PROMPT], padding)
            checks |= {f"{kind}_{check}": value for check, value in found.items()}
            more = {"attention_mask": inputs["attention_mask"]} if any(padding) else {"logits": steps}
            more |= {"prompt": inputs["input_ids"], "tokens": steps.argmax(-1)}
            expected |= {f"{kind}.{name}": value for name, value in more.items()}

        # Loaded in bfloat16 rather than cast to it: a cast would round the frequencies of rope as well.
        narrow = load(folder, "bfloat16")(input_ids=ids, use_cache=False, output_hidden_states=True)
        expected |= {f"bfloat16.hidden_states.{n}": hidden.float() for n, hidden in enumerate(narrow.hidden_states)}
        expected["bfloat16.logits"] = narrow.logits.float()
        with float64_constants(model.config.model_type):
            wide = load(folder, "float64")(input_ids=ids, use_cache=False)
    checks |= {"float64_vs_float32": distance(wide.logits, logits), "logits_std": round(float(logits.std()), 3)}
    checks["bfloat16_from_float32"] = distance(narrow.logits, logits)
    norms = {name: float(gradient.double().norm()) for name, gradient in gradients.items()}
    return {name: value.detach().clone().contiguous() for name, value in expected.items()}, norms, checks


@contextlib.contextmanager
def float64_constants(family: str) -> Iterator[None]:
    """Make PyTorch's constants float64 where the class of a family needs it: XGLM's has one that float32 does not
    hold."""
    torch.set_default_dtype(torch.float64 if family == "xglm" else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def pad_rows(ids: Any, padding: tuple[int, ...], side: str) -> dict[str, Any]:
    """Replace the last tokens of each row by padding on one side; positions count real tokens."""
    tokens, mask = torch.full_like(ids, PAD), torch.zeros_like(ids)
    for row, pad in enumerate(padding):
        length = ids.shape[1] - pad
        real = slice(pad, None) if side == "left" else slice(length)
        tokens[row, real], mask[row, real] = ids[row, :length], 1
    positions = {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)} if side == "left" else {}
    return {"input_ids": tokens, "attention_mask": mask, **positions}


def drop_unknown_inputs(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Drop inputs that the model's forward does not take, e.g. positions."""
    return {name: value for name, value in inputs.items() if name in inspect.signature(model.forward).parameters}


def generate_greedy(model: Any, prompts: Any, padding: tuple[int, ...]) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Return the padded prompts, the logits of greedy decoding (row by row, by full forward passes), and checks."""
    inputs = pad_rows(prompts, padding, "left")
    steps = []
    for prompt, pad in zip(prompts, padding, strict=True):
        ids = prompt[None, : PROMPT - pad]
        for _ in range(NEW):
            steps.append(model(input_ids=ids, use_cache=False).logits[0, -1])
            ids = torch.cat([ids, steps[-1].argmax()[None, None]], 1)
    logits = torch.stack(steps).unflatten(0, (-1, NEW))
    model.generation_config = transformers.GenerationConfig(pad_token_id=PAD)  # no token ends a row
    options = {"do_sample": False, "max_new_tokens": NEW, "output_logits": True, "return_dict_in_generate": True}
    cached = model.generate(inputs["input_ids"], attention_mask=inputs["attention_mask"], **options)
    best, second = logits.topk(2, -1).values.unbind(-1)
    checks = {"top2_margin": round(float((best - second).min()), 4)}
    checks["cache_vs_nocache"] = distance(logits, torch.stack(cached.logits, 1))
    checks["cache_same_tokens"] = bool((cached.sequences[:, -NEW:] == logits.argmax(-1)).all())
    return inputs, logits, checks


def distance(a: Any, b: Any) -> float:
    return float(f"{float((a.double() - b.double()).abs().max()):.2g}")


def to_hub_config(config: dict[str, Any], case: Case) -> dict[str, Any]:
    """Spell a config as most repositories on a hub do, without keys that equal the class's defaults."""
    hub = {name: value for name, value in config.items() if name not in ("rope_parameters", "transformers_version")}
    hub["torch_dtype"] = hub.pop("dtype")
    scaling = dict(config.get("rope_parameters", {}))
    for name, in_neox in {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}.items():
        if name in scaling:
            hub[in_neox if case.family == "gpt_neox" else name] = scaling.pop(name)
    if (kind := scaling.pop("rope_type", "default")) != "default":
        hub["rope_scaling"] = {"rope_type" if kind == "llama3" else "type": kind, **scaling}
    hub |= case.hub
    whole = parse(hub).to_dict()
    for name in sorted(set(hub) - {"model_type", "architectures", "torch_dtype", *case.hub}):
        shorter = {other: value for other, value in hub.items() if other != name}
        with contextlib.suppress(Exception):  # where the class refuses what is left
            hub = shorter if parse(shorter).to_dict() == whole else hub
    return hub


def parse(config: dict[str, Any]) -> Any:
    wide = lambda x: float(x["__float__"]) if "__float__" in x else x  # infinity, for which JSON has no number
    values = json.loads(json.dumps(config), object_hook=wide)  # a copy: the class writes into what it is given
    return transformers.AutoConfig.for_model(values.pop("model_type"), **values)


if __name__ == "__main__":
    tyro.cli(main)
