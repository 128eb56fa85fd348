"""Save a model as a checkpoint directory that transformers and `load` read: the family's name map, inverted."""

import dataclasses
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from zoo._checks import check_not_donated, describe_argument
from zoo._files import create_files
from zoo.layers.quantized.fp8 import FP8Linear
from zoo.models.decoder import Decoder
from zoo.models.encoder_decoder import EncoderDecoder
from zoo.models.hf.config import IGNORED_KEYS, read_config
from zoo.models.hf.encoder_heads import name_label_ids
from zoo.models.hf.errors import ConfigError, suggest_nearest
from zoo.models.hf.families import FAMILIES, get_family
from zoo.models.hf.predictors import set_predictors, write_count
from zoo.models.hf.score_head import has_score, is_of_transformers, score_family, score_origin
from zoo.models.hf.shapes import build_shapes
from zoo.models.hf.spec import Family, NameMap, Origin
from zoo.models.parameter_paths import find_differences, list_parameter_paths
from zoo.models.sequence_score import SequenceScore

from .directory import CONFIG_NAME, resolve_directory
from .formats import QUANTIZATION_KEY, split_quantization
from .formats.pack import describe_quantization, drop_quantization_if_plain, pack_like
from .generation_config import read_start
from .left_aside import describe_stale, open_source, write_back
from .model_card import Training, describe_model, name_base, write_model_card
from .plan import TensorPlan, plan_tensors
from .safetensors import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    CheckpointError,
    LazyTensor,
    order_tensors,
    write_tensors,
)
from .sentence_files import list_saved_files
from .stages import (
    Stored,
    drop_lacking,
    name_plain_matrices,
    read_name_map,
    restore_head_copies,
    restore_older,
    unpack,
    widen_integers,
    wrap,
)
from .tokenizer_files import copy_tokenizer, has_tokenizer

_logger = logging.getLogger("zoo")
_WEIGHT_FILE_PATTERN = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")


class NoFamilyError(CheckpointError):
    """Raised for a model that no family computes. Its weights are sound, but cannot be written for other tools."""

    def __init__(self, part: str, reasons: Sequence[str]):
        advice = (
            "without a family, eqx.tree_serialise_leaves(path, model) writes the model for this library, and "
            "train.Checkpoints a training state (docs/checkpoints.md)"
        )
        super().__init__("\n  ".join(["no checkpoint could be read as this model:", *reasons, advice]))
        self.part = part
        """Class of a part that is not from this library; else "this model", with a reason."""


def save(
    model: PyTree,
    directory: str | Path,
    family: str | Family | None = None,
    *,
    source: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
) -> None:
    """Save a model as a Hugging Face directory: `config.json` and safetensors under the family's tensor names.

    - `model`: a model, or a tree of its structure: gradients are saved under their parameters' names.
    - `family`: the family to save as. Default: for a loaded model the family it was loaded from; for a model made from
      scratch the first family that computes the same.
    - `source`: the directory, or the name on the hub, that the model was loaded from. Its tokenizer, chat template and
      generation_config.json are copied, and the tensors that `load` left aside are written back, bit for bit: vision
      towers, projectors, modules of multi-token prediction. If the model was trained, these were not, and a line in the
      log says so. Default: they are missing, with a line in the log.
    - `config`: keys to add or change in config.json that do not affect the computation: `{"eos_token_id": 2}`.
    - `shard_bytes`: a larger checkpoint is saved in shards with an index.

    A model that is in the directory is replaced, its shards too; other files stay.

    A directory without a README.md gets a model card, so that `hf upload NAME DIRECTORY` publishes it.

    Before anything is written, the config's model is built in shapes and compared with `model`, so that `load` returns
    the same model. A quantized checkpoint that was dequantized on load is saved as plain tensors; one loaded with
    `packed=True`, byte for byte; one that `zoo.adapters.quantize` packed to int4 or NVFP4, in the format of
    compressed-tensors. Tensors are written one at a time, and the old files of the directory are replaced
    only once all new ones are complete. With several processes, all of them call this and the first writes. Numbers
    that are not finite are written unchanged, and refused by `load`.

    The language model of a multimodal checkpoint is written back into it, under the names and in the config that it
    came with; with `family`, only the language model is written, as that family.

    **Raises** `NoFamilyError` if no family computes the same as the model, with the first differences;
    `CheckpointError` if the parts of a fused tensor have several dtypes, for a `source` of another model, and for the
    name of a file.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"zoo.save(model, directory): expected a path, got {describe_argument(directory)}")
    source = None if source is None else resolve_directory(source)
    write_model(model, Path(directory), family, source=source, config=config, shard_bytes=shard_bytes)
    had_one = getattr(getattr(model, "origin", None), "has_tokenizer", False)
    if jax.process_index() == 0 and source is None and had_one and not has_tokenizer(Path(directory)):
        _logger.warning("%s has no tokenizer: zoo.save(..., source=) copies the checkpoint's", directory)


def write_model(
    model: PyTree,
    directory: Path,
    family: str | Family | None = None,
    *,
    source: Path | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = 5_000_000_000,
    training: Training | None = None,
) -> None:
    """Save a model as `save` does, without a word on a tokenizer that the caller writes; `training` is for the card."""
    _require_directory(directory)
    check_not_donated(model)
    model, origin = resolve_model(model, family, dict(config or {}))
    opened = None if source is None else open_source(source, origin)
    notes = origin if opened is None else dataclasses.replace(origin, wrapping=opened.wrapping)
    stored = Stored(json.loads(notes.config), export_tensors(model, read_name_map(notes)), notes)
    restored = restore_older(widen_integers(unpack(restore_head_copies(drop_lacking(stored)))))
    whole = restored if opened is None else write_back(restored, opened)
    _write_checkpoint(model, directory, wrap(name_plain_matrices(whole)), shard_bytes, source, training)
    if jax.process_index() != 0:
        return
    if isinstance(model, EncoderDecoder):
        start = read_start(directory, read_config(origin.family, json.loads(notes.config)), model.start)
        if start != model.start:
            _logger.warning("%s: targets begin with %s by its files, and with %s here", directory, start, model.start)
    if opened is not None and (stale := describe_stale(opened)):
        _logger.warning("%s: %s", directory, stale)
    lacking = getattr(getattr(model, "origin", None), "left_aside", "")
    if source is None and lacking:
        _logger.warning(
            "%s lacks what was left aside on loading: %s; zoo.save(..., source=) writes it too", directory, lacking
        )


def resolve_model(
    model: PyTree, family: str | Family | None = None, overrides: dict[str, Any] | None = None
) -> tuple[PyTree, Origin]:
    """Return a model as its family's checkpoint has it, and the family and config to save it with.

    **Raises** `CheckpointError` for adapters, `ValueError` for edits, and as `resolve_origin` does.
    """
    _refuse_adapters(model)
    parts = [model, *(getattr(model, name, None) for name in ("encoder", "decoder", "text", "image"))]
    if edits := [edit for part in parts for edit in getattr(part, "edits", ())]:
        raise ValueError(
            f"a checkpoint has no place for edits, and the model has one of {edits[0].name}: save zoo.unpatch(model)"
        )
    model = _take_master_weights(model)
    return model, resolve_origin(model, family, name_label_ids(overrides or {}))


def _require_directory(directory: Path) -> None:
    """**Raises** `CheckpointError` for the name of a weight file, and for an existing file."""
    names_weights = directory.suffix == ".safetensors"
    if names_weights or directory.is_file():
        advice = f"pass {directory.parent}" if names_weights else "choose another name"
        raise CheckpointError(
            f"{directory} is a file: expected a directory, which gets {CONFIG_NAME} and {SAFE_WEIGHTS_NAME}: {advice}"
        )


def _take_master_weights(model: PyTree) -> PyTree:
    """Return a model that is trained in FP8 with plain linear layers of the same parameters in place of FP8 ones."""

    def to_plain(node: Any) -> Any:
        if isinstance(node, FP8Linear):
            return node.to_linear()
        return node

    return jax.tree.map(to_plain, model, is_leaf=lambda node: isinstance(node, FP8Linear))


def _refuse_adapters(model: PyTree) -> None:
    """**Raises** `CheckpointError` for a model with adapters, which no family's checkpoint has."""
    names = (path.name for path in list_parameter_paths(model) if path.leaf.adapter_parameter)
    if name := next(names, None):
        raise CheckpointError(
            f"the model has adapters, {name} among them: zoo.adapters.merge(model) adds them to the weights, which "
            "zoo.save then writes, and zoo.adapters.save(model, directory) writes only them, in PEFT's format"
        )


def resolve_origin(model: Any, requested: str | Family | None, overrides: dict[str, Any]) -> Origin:
    """Return the family and config to save a model with.

    **Raises** `NoFamilyError` with the reason for each family that does not fit; `CheckpointError` for an unknown one.
    """
    family = _get_family(requested) if isinstance(requested, str) else requested
    origin = getattr(model, "origin", None)
    is_read_packed = origin is not None and QUANTIZATION_KEY in json.loads(origin.config)
    if not is_read_packed and (quantization := describe_quantization(model)):
        overrides = {QUANTIZATION_KEY: quantization, **overrides}
    count = len(getattr(model, "predictors", ()))
    is_score = isinstance(model, SequenceScore)
    if is_score and family is not None and has_score(family):
        family = score_family(family)
    if is_score and origin is not None and has_score(origin.family):
        origin = score_origin(origin, model)
    reasons = []
    if origin is not None and family in (None, origin.family):
        wrapping = origin.wrapping if family is None else None
        given = json.loads(origin.config)
        if origin.wrapping is not None and wrapping is None:  # only the language model
            given["architectures"] = [origin.family.architecture]
            given["model_type"] = origin.family.name
        if count != origin.predictors:
            given = write_count(given, origin.family, count)
        config = drop_quantization_if_plain(model, {**given, **overrides}, origin.packed)
        reason = _find_config_mismatch(model, origin.family, config)
        if reason is None:
            return dataclasses.replace(
                origin, config=_format_config(config, model), wrapping=wrapping, predictors=count
            )
        family = origin.family  # changed since it was loaded: the new model may still be one of the family
        reasons.append(f"it was read as {family.name}, and {reason}")
    read_alone = []
    if family is not None:
        candidates = [family, *family.variants]
    elif is_score:
        candidates = filter(has_score, FAMILIES.values())
    else:
        candidates = [x for known in FAMILIES.values() for x in (known, *known.variants)]
    sentence_files = () if origin is None else origin.sentence_files
    for candidate in candidates:
        try:
            if is_score:
                candidate = score_family(candidate)
            if candidate.describe is None:
                read_alone.append(candidate.name)
                continue
            config = {**_describe_config(model, candidate), **overrides}
            if count:
                config = write_count(config, candidate, count)
            reason = _find_config_mismatch(model, candidate, config)
        except ConfigError as error:
            reason = str(error)
        if reason is None:
            return Origin(candidate, _format_config(config, model), predictors=count, sentence_files=sentence_files)
        reasons.append(f"{candidate.name}: {reason}")
    reasons.sort(key=_rank_reason)
    if read_alone:
        names = ", ".join(read_alone)
        reasons.append(f"{names}: only models that were read from such a checkpoint can be written as one")
    raise NoFamilyError(_name_foreign_part(model, reasons), reasons)


def _rank_reason(reason: str) -> int:
    """Return a place for the reason of a family: families of other mixers come last, since a long message is cut."""
    if ": its mixer is " in reason or ": none of its " in reason:
        return 2
    return int(": its " in reason)


def _name_foreign_part(model: Any, reasons: Sequence[str]) -> str:
    """Return the class of the first module from outside this library, or "this model" and LLaMA's reason."""
    is_foreign = lambda x: isinstance(x, eqx.Module) and not type(x).__module__.startswith("zoo.")
    foreign = filter(is_foreign, jax.tree.leaves(model, is_leaf=is_foreign))
    reason = next((reason for reason in reasons if reason.startswith("llama: ")), reasons[0])
    return next((type(x).__name__ for x in foreign), f"this model ({reason})")


def _get_family(name: str) -> Family:
    family = get_family(name)
    if family is None:
        raise CheckpointError(f"there is no family {name!r}{suggest_nearest(name, FAMILIES)}")
    return family


def _describe_config(model: Any, family: Family) -> dict[str, Any]:
    """Return the config.json of a model made from scratch, in the family's own keys."""
    assert family.describe is not None
    family_keys = {usual: key for key, usual in family.aliases.items()}
    known = family.defaults.keys() | IGNORED_KEYS
    values = {key: value for key, value in family.describe(model).items() if key in known}
    header = {"architectures": [family.architecture], "model_type": family.name}
    return {**header, **{family_keys.get(key, key): value for key, value in values.items()}}


def _find_config_mismatch(model: Any, family: Family, config: Mapping[str, Any]) -> str | None:
    """Return the first difference between a model and the one that a config describes; None if they are equal."""
    try:
        config, quantized = split_quantization(config)
        read = set_predictors(read_config(family, config), len(getattr(model, "predictors", ())))
        built = build_shapes(family, read)
        if quantized is not None:
            built = pack_like(built, model, quantized)
    except ValueError as error:
        return str(error)
    return next(find_differences(model, built), None)


def _format_config(config: Mapping[str, Any], model: Any) -> str:
    """Return config.json as text, with the dtype of most parameters, under `torch_dtype` if the config used that key.
    Norms and biases may be in float32 where the rest is not; a quantized model keeps the dtype that it has there."""
    sizes: Counter[str] = Counter()
    for x in jax.tree.leaves(model):
        if hasattr(x, "dtype") and jax.numpy.issubdtype(x.dtype, jax.numpy.floating):
            sizes[np.dtype(x.dtype).name] += x.size
    config = dict(config)
    if len(sizes) == 1 or (sizes and QUANTIZATION_KEY not in config):
        key = "torch_dtype" if "torch_dtype" in config else "dtype"
        config[key] = sizes.most_common(1)[0][0]
    return _format_json(config)


def _format_json(value: Any) -> str:
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def _write_checkpoint(
    model: Any, directory: Path, stored: Stored, shard_bytes: int, source: Path | None, training: Training | None
) -> None:
    """Write config, shards and index under temporary names, then rename them all."""
    origin = stored.notes
    shards = _assign_shards(stored.tensors, shard_bytes)
    numbered = [f"model-{number + 1:05}-of-{len(shards):05}.safetensors" for number in range(len(shards))]
    files = [SAFE_WEIGHTS_NAME] if len(shards) == 1 else numbered
    texts = {CONFIG_NAME: _format_json(stored.config), **list_saved_files(origin)}
    if len(shards) > 1:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        size = sum(tensor.nbytes for tensor in stored.tensors.values())
        texts[SAFE_WEIGHTS_INDEX_NAME] = _format_json({"metadata": {"total_size": size}, "weight_map": weight_map})
    if jax.process_index() == 0:
        for file in (*files, *texts):
            (directory / file).parent.mkdir(parents=True, exist_ok=True)
        with create_files(directory) as create:
            for file, shard in zip(files, shards, strict=True):
                write_tensors(create(file), shard)
            for file, text in texts.items():
                create(file).write(text.encode())
        for old in directory.iterdir():  # stale weights, which `load` might read instead
            if _WEIGHT_FILE_PATTERN.fullmatch(old.name) and old.name not in (*files, *texts):
                old.unlink()
        if source is not None:
            copy_tokenizer(source, directory)
        if is_of_transformers(origin.family):  # transformers does not read a family of one's own
            training = training or Training(None if source is None else name_base(source))
            card = describe_model(origin.family.name, training, _name_reader(model, origin), origin.family.package)
            write_model_card(directory, card)
    else:
        for shard in shards:  # take part in the all-gather of each tensor, in the order in which the first one writes
            for tensor in order_tensors(shard).values():
                tensor.read()
                tensor.release()
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("zoo.save")  # no process loads before all files are written


def _name_reader(model: Any, origin: Origin) -> str:
    """Return the class of transformers that reads a model with its head."""
    if isinstance(model, SequenceScore):
        return "AutoModelForSequenceClassification"
    if isinstance(model, Decoder) and origin.wrapping is None:
        return "AutoModelForCausalLM"
    if isinstance(model, EncoderDecoder):
        return "AutoModelForSpeechSeq2Seq" if origin.family.name == "whisper" else "AutoModelForSeq2SeqLM"
    architectures = json.loads(origin.config).get("architectures") or [""]
    heads = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    return "AutoModel" + next((head for head in heads if architectures[0].endswith(head)), "")


def export_tensors(model: PyTree, name_map: NameMap) -> dict[str, LazyTensor]:
    """Return the checkpoint's tensors, sorted by name. Each is assembled from the model's arrays when it is read."""
    leaves = jax.tree.leaves(model)
    tensors = {}
    for name, tensor_plan in sorted(plan_tensors(model, name_map).items()):
        dtypes = {np.dtype(leaves[piece.leaf].dtype) for piece in tensor_plan.slices}
        if len(dtypes) > 1:
            listed = " and ".join(sorted(map(str, dtypes)))
            parts = ", ".join(tensor_plan.mapping.parts)
            raise CheckpointError(f"{name} is made of {parts}, which are {listed}: cast them to one dtype")
        tensors[name] = LazyTensor(dtypes.pop(), tensor_plan.shape, partial(_assemble_tensor, tensor_plan, leaves))
    return tensors


def _assemble_tensor(plan: TensorPlan, leaves: Sequence[Any]) -> np.ndarray:
    parts = [gather_to_host(leaves[piece.leaf], piece.index) for piece in plan.slices]
    if plan.mapping.keeps_rows and not plan.mapping.transposed:
        return parts[0].reshape(plan.shape)
    tensor = np.empty(plan.shape, parts[0].dtype)
    views = plan.mapping.views(tensor, plan.part_shapes, plan.num_stacked_dims)
    for view, part in zip(views, parts, strict=True):
        view[...] = part.reshape(view.shape)
    return tensor


def _assign_shards(tensors: Mapping[str, LazyTensor], max_bytes: int) -> list[dict[str, LazyTensor]]:
    """Fill shards with tensors in order, up to `max_bytes` each. A larger tensor gets a shard of its own."""
    shards: list[dict[str, LazyTensor]] = [{}]
    shard_bytes = 0
    for name, tensor in tensors.items():
        if shards[-1] and shard_bytes + tensor.nbytes > max_bytes:
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_bytes += tensor.nbytes
    return shards


def is_in_host_memory(array: Any) -> bool:
    """Return True if numpy sees the array's own memory, without a copy."""
    return isinstance(array, jax.Array) and [device.platform for device in array.devices()] == ["cpu"]


def gather_to_host(array: Any, index: tuple[int, ...]) -> np.ndarray:
    """Gather `array[index]` from all of its shards into host memory."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(array[index], tiled=True))
    if index and is_in_host_memory(array):
        return np.array(np.asarray(array)[index])  # a slice of a JAX array would be compiled for each shape
    if index or not isinstance(array, jax.Array):
        return np.asarray(array[index])
    gathered = np.empty(array.shape, array.dtype)  # shard by shard: np.asarray would leave a cached copy in the array
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            gathered[(*shard.index, ...)] = shard.data  # a scalar too
    return gathered
