"""Advice for attributes of models in PyTorch, and in Flax, that a model here does not have."""

import re
from typing import Any, NoReturn

import equinox as eqx

from .hf.families import get_family

_DROPOUT = "a model has no modes: it drops out where it is called with key=, and not without"
_PLACE = "zoo.place(model, zoo.make_mesh()) puts a model on devices, zoo.cast(model, dtype) changes its dtype"
_CAST = 'zoo.cast(model, "{}") returns the model in another dtype'
_TRAINABLE = (
    "zoo.trainable(model) is the tree of parameters that an optimizer takes; zoo.models.list_parameter_paths(model) "
    "has their names"
)
_GRADIENTS = "gradients are values: loss, grads = zoo.value_and_grad(loss_fn, mesh)(model, batch)"

_LAYERS = (
    'zoo.models.get(model, "layers.0.attention.query.weight") is a parameter by its name, zoo.models.replace returns a '
    "model with another; layers of one structure are stacked, in model.stack"
)
_CALL = "call the model: model(tokens)"

TORCH_HABITS = {
    "generate": "zoo.generate(model, tokens, max_new_tokens=16)",
    "forward": _CALL,
    "apply": _CALL,
    "layers": _LAYERS,
    "blocks": _LAYERS,
    "get_parameter": _LAYERS,
    "eval": _DROPOUT,
    "train": _DROPOUT,
    "to": _PLACE,
    "cuda": _PLACE,
    "cpu": _PLACE,
    "device": _PLACE,
    "half": _CAST.format("float16"),
    "bfloat16": _CAST.format("bfloat16"),
    "float": _CAST.format("float32"),
    "parameters": _TRAINABLE,
    "named_parameters": _TRAINABLE,
    "num_parameters": "zoo.count(model)",
    "zero_grad": _GRADIENTS,
    "backward": _GRADIENTS,
    "requires_grad_": "zoo.adapters freezes a model and trains a part of it",
    "state_dict": "zoo.save(model, directory) writes the weights under PyTorch's names",
    "load_state_dict": "zoo.load(directory), or zoo.from_torch(state_dict, config=config), returns a model",
    "save_pretrained": "zoo.save(model, directory)",
    "from_pretrained": "zoo.load(directory)",
    "compile": "eqx.filter_jit(function)(model, ...) compiles a function of the model",
    "config": "a model that was loaded has the text of its config.json in model.origin.config",
}


def explain_missing_name(module: str, name: str) -> NoReturn:
    """Raise the `AttributeError` of a name that a package lacks, with advice for a class of transformers."""
    message = f"module {module!r} has no attribute {name!r}"
    found = re.fullmatch(r"([A-Z]\w*?)(LMHead)?(Model)?(For\w+)?", name)
    if found and (found[1] == "Auto" or get_family(found[1].lower()) is not None):
        message += (
            ": zoo.load(directory) loads a checkpoint of any family, zoo.models.preset(name, key=key) makes a "
            "published size, and zoo.models.Transformer LLaMA's architecture in sizes of your own"
        )
    raise AttributeError(message)


def explain_torch_habit(model: Any, name: str) -> NoReturn:
    """Raise the `AttributeError` of an attribute that `model` lacks: `__getattr__` of models, which Python calls only
    where it finds nothing."""
    message = f"{type(model).__name__!r} object has no attribute {name!r}"
    if name in TORCH_HABITS:
        message += f": {TORCH_HABITS[name]}"
    raise AttributeError(message, name=name, obj=model)


def hash_for_jit(model: eqx.Module) -> int:
    """Hash a model, for `jax.jit(model)`. **Raises** `TypeError` for a model of arrays, which JAX cannot hash."""
    try:
        return eqx.Module.__hash__(model)
    except TypeError:
        raise TypeError(
            f"{type(model).__name__} holds arrays, which have no hash. Instead of jax.jit(model), compile a function "
            "that takes the model as an argument: eqx.filter_jit(lambda model, tokens: model(tokens))"
        ) from None
