"""Train a language model of transformers in PyTorch for a few steps, and store every step for `zoo parity --train`.

    python -m scripts.train_in_torch --out run                          # a tiny Llama, made from --seed
    python -m scripts.train_in_torch --model DIRECTORY --out run        # a causal language model, but for mixtures
    python -m scripts.train_in_torch --dtype bfloat16 --out run         # under autocast
    zoo parity --train run --steps 20

Needs `pip install torch transformers safetensors`. AdamW decays matrices, and neither norms, biases nor embeddings. The
gradient's norm is clipped, and the learning rate rises over `--warmup` steps and then is constant. Batches are random
tokens. Mixtures are left out since transformers names their experts in memory otherwise than in files. The folder gets:

    initial/                 the model before the first step, as transformers saves it
    run.json                 hyperparameters, the learning rate of every step, and names and shapes of all parameters
    step-0000.safetensors    of each step `tokens` and `targets`, `loss` and `gradient_norm`, and for all parameters one
                             after another, in the order of run.json: `gradients` (before clipping), and after the step
                             `weights`, `first_moments` and `second_moments`

The files of docs/fixtures/llama_training were written by the first command with `--vocab 12 --embed 8 --mlp 4
--batch 4 --seq-len 8 --clip 0.7`, torch 2.13.0 and transformers 5.24.0.
"""

import importlib
import json
from pathlib import Path
from typing import Any, Literal

import tyro

try:
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    safetensors: Any = importlib.import_module("safetensors.torch")
except ImportError:
    torch = transformers = safetensors = None


def main(
    *,
    out: Path,
    model: Path | None = None,
    vocab: int = 128,
    embed: int = 64,
    mlp: int = 96,
    steps: int = 20,
    batch: int = 8,
    seq_len: int = 32,
    learning_rate: float = 3e-3,
    warmup: int = 5,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    seed: int = 0,
) -> None:
    """Train `model`, or a Llama of two layers with these sizes, and write every step to `out`."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # a fixed order of summation
    network = make_llama(vocab, embed, mlp) if model is None else load_model(model)
    network.eval()  # without dropout, whose random numbers JAX draws otherwise
    network.save_pretrained(out / "initial")
    parameters = dict(network.named_parameters())
    decayed = list_decayed(network)
    optimizer = torch.optim.AdamW(
        [
            {"params": [parameters[name] for name in decayed], "weight_decay": weight_decay},
            {"params": [x for name, x in parameters.items() if name not in decayed], "weight_decay": 0.0},
        ],
        betas=(b1, b2),
        eps=eps,
    )
    rates = [learning_rate * min(1, (step + 1) / max(warmup, 1)) for step in range(steps)]
    facts = {
        "learning_rates": rates,
        "b1": b1,
        "b2": b2,
        "eps": eps,
        "weight_decay": weight_decay,
        "clip": clip,
        "dtype": dtype,
        "decayed": decayed,
        "parameters": {name: list(x.shape) for name, x in parameters.items()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    (out / "run.json").write_text(json.dumps(facts, indent=1) + "\n")
    generator = torch.Generator().manual_seed(seed)
    for step, rate in enumerate(rates):
        rows = draw_tokens(network.config, (batch, seq_len + 1), generator)
        for group in optimizer.param_groups:
            group["lr"] = rate
        stored = train_step(network, optimizer, rows, clip, dtype)
        safetensors.save_file(stored, out / f"step-{step:04d}.safetensors")
        print(f"step {step:3}  loss {stored['loss']:.5f}  norm {stored['gradient_norm']:.3f}", flush=True)


def make_llama(vocab: int, embed: int, mlp: int) -> Any:
    """Make a Llama of two layers, with two queries to a key and tied embeddings."""
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=embed,
        intermediate_size=mlp,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        attn_implementation="eager",
        initializer_range=0.1,  # of matrices this small; the default of 0.02 leaves attention almost uniform
    )
    return transformers.LlamaForCausalLM(config)


def load_model(directory: Path) -> Any:
    """Load a causal language model in float32."""
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options)


def draw_tokens(config: Any, shape: tuple[int, int], generator: Any) -> Any:
    """Draw tokens, except padding, at which embeddings of PyTorch have no gradient."""
    tokens = torch.randint(0, config.vocab_size, shape, generator=generator)
    padding = config.pad_token_id
    if padding is None:
        return tokens
    return torch.where(tokens == padding, (padding + 1) % config.vocab_size, tokens)


def list_decayed(network: Any) -> list[str]:
    """Return the names of the parameters with weight decay: matrices, except embeddings."""
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, torch.nn.Embedding)}
    return [name for name, x in network.named_parameters() if x.ndim >= 2 and id(x) not in embeddings]


def train_step(network: Any, optimizer: Any, rows: Any, clip: float, dtype: str) -> dict[str, Any]:
    """Take one step, and return what is stored of it."""
    tokens = rows[:, :-1].contiguous()
    targets = rows[:, 1:].contiguous()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
        logits = network(input_ids=tokens, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    parameters = list(network.parameters())
    gradients = join(parameter.grad for parameter in parameters)
    norm = torch.nn.utils.clip_grad_norm_(parameters, clip)
    optimizer.step()
    return {
        "tokens": tokens,
        "targets": targets,
        "loss": loss.detach(),
        "gradient_norm": norm,
        "gradients": gradients,
        "weights": join(parameters),
        "first_moments": join(optimizer.state[parameter]["exp_avg"] for parameter in parameters),
        "second_moments": join(optimizer.state[parameter]["exp_avg_sq"] for parameter in parameters),
    }


def join(tensors: Any) -> Any:
    """Copy tensors, one after another."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


if __name__ == "__main__":
    if torch is None:
        raise SystemExit("a package is not installed: pip install torch transformers safetensors")
    tyro.cli(main)
