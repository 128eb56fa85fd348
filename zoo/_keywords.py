"""Keywords of functions and keys of configs: what an unknown one may mean, by words that other libraries use."""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable
from typing import ParamSpec, TypeVar, Unpack, get_args, get_origin

import numpy as np

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_SYNONYMS = (
    "vocab_size n_vocab vocab",
    "hidden_size n_embd d_model dim embed_dim embed hidden_dim model_dim",
    "num_hidden_layers n_layer n_layers num_layers layers depth",
    "num_attention_heads n_head n_heads num_heads heads",
    "num_key_value_heads n_kv_heads num_kv_heads kv_heads",
    "head_dim d_head head_size",
    "intermediate_size n_inner d_ff ffn_dim ffn_hidden_size mlp_dim mlp",
    "max_position_embeddings n_positions n_ctx max_seq_len max_seq_length context_length block_size",
    "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps epsilon eps",
    "rope_theta rope_base rotary_base",
    "hidden_act activation_function activation act_fn",
    "tie_word_embeddings tie_embeddings tied",
    "sliding_window window_size window",
    "num_experts num_local_experts n_routed_experts n_experts experts",
    "num_experts_per_tok experts_per_token top_k top",
    "rank r lora_r lora_rank",
    "alpha lora_alpha",
    "dropout lora_dropout",
    "targets target_modules",
    "max_new_tokens max_length max_tokens",
    "stop_tokens eos_token_id",
    "temperature do_sample",
    "samples num_return_sequences",
    "mask attention_mask",
    "tokens input_ids",
    "key rng rngs seed",
    "dtype torch_dtype",
    "mesh device_map device devices",
    "data dp ddp replica data_parallel",
    "fsdp zero shard fully_sharded fully_sharded_data_parallel",
    "tensor tp mp model tensor_parallel model_parallel",
    "context cp sp seq sequence context_parallel sequence_parallel",
    "expert ep experts expert_parallel",
    "pipe pp pipeline stage stages pipeline_parallel",
)


def find_synonym(word: str, known: Iterable[str]) -> str | None:
    """Return a known word for the same thing, None if there is none."""
    known = set(known)
    groups = [words.split() for words in _SYNONYMS]
    return next((other for group in groups if word in group for other in group if other in known), None)


def check_keywords(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Let a function name the argument that was meant by an unknown keyword, and refuse a float where an annotation
    asks for a whole number. Keywords of `**options: Unpack[...]` are arguments like the others.

    **Raises** `TypeError`.
    """

    @functools.cache
    def find_signature() -> inspect.Signature:  # at the first call: import zoo stays quick
        return _expand_signature(function)

    @functools.wraps(function)
    def checked(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        known = find_signature().parameters
        for name, value in options.items():
            is_whole = name in known and known[name].annotation in (int, int | None)
            if is_whole and isinstance(value, float | np.floating):
                raise TypeError(f"{name}={value!r}: expected a whole number, as an int")
            if name not in known:
                if meant := find_synonym(name.lower(), known):
                    advice = f"{meant}= is that here"
                elif nearest := difflib.get_close_matches(name, known, n=1, cutoff=0.75):
                    advice = f"did you mean {nearest[0]}=?"
                else:
                    advice = f"it takes {', '.join(known)}"
                called = function.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{called} has no argument {name!r}: {advice}")
        return function(*arguments, **options)

    if inspect.unwrap(function).__code__.co_flags & inspect.CO_VARKEYWORDS:
        vars(checked)["__signature__"] = find_signature()
    return checked


def _expand_signature(function: Callable) -> inspect.Signature:
    """Return the signature of a function, with the keywords of `**options: Unpack[...]` one by one, for `help` and
    notebooks. Their defaults are `...`: the type does not name them."""
    signature = inspect.signature(function)
    parameters = []
    for parameter in signature.parameters.values():
        if get_origin(parameter.annotation) is Unpack:
            (keywords,) = get_args(parameter.annotation)
            for name, kind in keywords.__annotations__.items():
                parameters.append(inspect.Parameter(name, parameter.KEYWORD_ONLY, default=..., annotation=kind))
        else:
            parameters.append(parameter)
    return signature.replace(parameters=parameters)
