"""Export a model: check what is asked for, trace and lower its programs, and write them."""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
from jax import export as jax_export
from jax.errors import InconclusiveDimensionOperation

from zoo._optional import require_installed
from zoo.layers import AbstractMixer
from zoo.models import Decoder, Encoder, ImageEncoder
from zoo.models.configure import configure
from zoo.ops.platform import for_export, normalize_platform, stand_in_platform, target_platform
from zoo.parallel import Mesh, leaves
from zoo.parallel.module import find_operations
from zoo.parallel.place import place

from .folder import check_folder, write_folder
from .programs import Program, ProgramBuilder
from .sizes import SYMBOLIC, check_mesh, choose_sizes, make_dims
from .weights import make_rebuild, name_weights, unroll

_KINDS = {Decoder: "decoder", Encoder: "encoder", ImageEncoder: "image encoder"}
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def export(
    model: Decoder | Encoder | ImageEncoder,
    folder: str | Path,
    *,
    mesh: Mesh | None = None,
    platforms: Sequence[str] | None = None,
    batch: int | None = None,
    seq_len: int | Literal["symbolic"] | None = None,
    length: int | None = None,
    image_size: int | tuple[int, int] | None = None,
    overwrite: bool = False,
) -> Path:
    """Write a model as programs that run without this library; return the folder.

        zoo.export(model, "out")        # then: python out/serve.py "1 2 3" --new 8

    Each program is a `jax.export` artifact, `forward.jax_export`, and the same as StableHLO text, `forward.mlir`.
    Weights are arguments, in `weights.safetensors`, by parameter path. `export.json` describes the inputs and results,
    and `serve.py` runs the programs with jax, numpy and flatbuffers.

    - A `Decoder` has `forward(weights, tokens)`, whose result is logits; `init(weights, rows)`, the empty states of as
      many rows; `prefill` and `decode(weights, tokens, positions, states)`, which read `seq_len` tokens and one token
      per row behind those in `states`, and return the logits after the last one and the new states. Rows with fewer
      tokens are padded on the left, at position -1; in `forward` on the right.
    - An `Encoder` has `forward(weights, tokens, mask)`, with `token_types` if it embeds them, and an `ImageEncoder`
      `forward(weights, images)`. Results are logits, or a dict of features.

    Arguments:

    - `mesh`: export for the devices of a mesh. Weights are arguments sharded by the layout; `batch` is required.
    - `platforms`: "cpu", "cuda", "rocm" or "tpu", several for one artifact that runs on each; by default the platform
      of this process. With several, the choices that depend on the platform are those of CPUs, which run anywhere.
    - `batch`: number of rows, by default symbolic: any number. Each number compiles once.
    - `seq_len`: number of tokens of `forward` and `prefill`; by default 128, or the number of learned positions if that
      is less. "symbolic": any number, for `forward` only. Attention is then computed by its definition, whose memory
      grows with the square of the length.
    - `length`: capacity of the KV caches, by default 1,024 or `seq_len` if that is more, at most the learned positions.
      RoPE that depends on the sequence length takes that of this many tokens.
    - `image_size`: height and width of images, or both as one number; by default those that positions were learned for.
    - `overwrite`: write into a folder that is not empty. An earlier export is replaced without it.

    **Raises** `ImportError` without flatbuffers; `TypeError` for a model of another class; `ValueError` for a folder
    with other files, an unknown platform, sizes that the model does not have, a symbolic batch on a mesh or of a model
    that has arrays per row, and a kernel that was chosen by name, such as cuDNN's or Pallas' attention;
    `NotImplementedError` for a mesh that shards the sequence or the layers, for several processes, and for a model that
    calls back into Python.
    """
    require_installed("flatbuffers", extra="export")
    kind = next((kind for model_class, kind in _KINDS.items() if isinstance(model, model_class)), None)
    if kind is None:
        raise TypeError(f"a Decoder, an Encoder or an ImageEncoder is exported, not a {type(model).__name__}")
    if jax.process_count() > 1:
        raise NotImplementedError("export runs in one process: zoo.save the model, and export it from there")
    folder = Path(folder)
    check_folder(folder, overwrite=overwrite)
    sizes = choose_sizes(model, batch, seq_len, length, image_size)
    check_mesh(mesh, batch)
    platforms = _check_platforms(platforms, mesh)
    _refuse_symbolic_rows(model, batch)
    if seq_len == SYMBOLIC:
        model = _allow_any_length(model)
    model = unroll(model)
    names = name_weights(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model)
    if mesh is not None:
        mesh = mesh.without_sequence_parallelism
        shapes = place(shapes, mesh)
    builder = ProgramBuilder(shapes, make_rebuild(model, names), *make_dims(sizes), mesh)
    weights = dict(zip(names, jax.tree.leaves(shapes), strict=True))
    with _tracing_for(platforms, mesh):
        programs = _build(builder, sizes)
        exported = {name: _lower(name, program, weights, platforms) for name, program in programs.items()}
    about = {
        "kind": kind,
        **sizes,
        "platforms": list(platforms),
        "devices": 1 if mesh is None else mesh.devices.size,
        "mesh": {} if mesh is None else dict(mesh.devices.shape),
        "jax": jax.__version__,
        "programs": {name: _describe_program(program, exported[name]) for name, program in programs.items()},
    }
    if "decode" in programs:
        about["states"] = _describe_states(programs["decode"])
    write_folder(folder, exported, dict(zip(names, jax.tree.leaves(model), strict=True)), about)
    return folder


def _build(builder: ProgramBuilder, sizes: Mapping[str, Any]) -> dict[str, Program]:
    if isinstance(builder.model, Decoder):
        return builder.build_decoder(sizes.get("length"))
    if isinstance(builder.model, Encoder):
        return builder.build_encoder()
    height, width = sizes["image_size"]
    return builder.build_image_encoder((height, width))


@contextlib.contextmanager
def _tracing_for(platforms: Sequence[str], mesh: Mesh | None) -> Iterator[None]:
    """Make the choices of implementations for the platform, or as for CPUs if there are several."""
    platform = normalize_platform(platforms[0]) if len(platforms) == 1 else "cpu"
    with for_export(True), target_platform(platform), contextlib.ExitStack() as stack:
        if mesh is not None and mesh.platform != platform:
            stack.enter_context(stand_in_platform(platform))
        try:
            yield
        except (InconclusiveDimensionOperation, TypeError) as error:
            if isinstance(error, TypeError) and "_DimExpr" not in str(error):  # len() and range() of a symbolic number
                raise
            raise ValueError(
                "the model computes with the numbers of rows and tokens in ways that symbolic ones do not allow: pass "
                f"batch and seq_len as numbers ({str(error).splitlines()[0]})"
            ) from error


def _lower(name: str, program: Program, weights: dict[str, Any], platforms: Sequence[str]) -> jax_export.Exported:
    """Trace and lower a program. All arguments are kept, also those that it does not use."""

    @functools.wraps(program.run)  # with the names of the arguments, which StableHLO shows
    def run(*args: Any) -> Any:
        return program.run(*args)

    run.__name__ = name
    try:
        return jax_export.export(jax.jit(run, keep_unused=True), platforms=platforms)(weights, *program.inputs.values())
    except (NotImplementedError, ValueError) as error:
        if "host_callbacks" in str(error):
            raise NotImplementedError(
                "the model calls a Python function (jax.pure_callback, jax.debug.print), which an exported program "
                "cannot hold: take it out"
            ) from error
        if "custom calls whose targets" in str(error):
            raise NotImplementedError(
                f"the model calls kernels that an exported program cannot hold: {error}"
            ) from error
        raise


def _describe_program(program: Program, exported: jax_export.Exported) -> dict[str, Any]:
    """Describe the inputs of a program, which come after the weights, and its results."""
    results = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    if len(program.outputs) == 1:
        results = {program.outputs[0]: results}
    elif program.outputs:
        results = dict(zip(program.outputs, results, strict=True))
    return {"inputs": _describe_arrays(program.inputs), "outputs": _describe_arrays(results)}


def _describe_arrays(named: Mapping[str, Any]) -> dict[str, Any]:
    """Describe arrays by name. The list of states is described once for all programs."""
    return {name: name if name == "states" else _describe_array(x) for name, x in named.items()}


def _describe_states(decode: Program) -> list[dict[str, Any]]:
    pairs = zip(decode.states, decode.inputs["states"], strict=True)
    return [{"name": name, **_describe_array(x)} for name, x in pairs]


def _describe_array(x: Any) -> dict[str, Any]:
    return {"shape": [size if isinstance(size, int) else str(size) for size in x.shape], "dtype": x.dtype.name}


def _allow_any_length(model: Any) -> Any:
    """Return a model whose attention is computed by its definition. **Raises** `ValueError` for a recurrence."""
    is_mixer = lambda x: isinstance(x, AbstractMixer)
    for mixer in filter(is_mixer, jax.tree.leaves(model, is_leaf=is_mixer)):
        if "attention" not in {operation.kind for _, operation in find_operations(mixer)}:
            raise ValueError(
                f"seq_len='symbolic' is for attention only, and {type(mixer).__name__} reads tokens in chunks of one "
                "size: pass a number"
            )
    return configure(model, attention="reference")


def _check_platforms(platforms: Sequence[str] | None, mesh: Mesh | None) -> tuple[str, ...]:
    """Return the names of platforms as `jax.export` knows them. **Raises** `ValueError` for other names, and none."""
    if platforms is None:
        if mesh is not None and mesh.devices.devices.flat[0].platform != "gpu":
            return (mesh.devices.devices.flat[0].platform,)
        return (jax_export.default_export_platform(),)  # which tells cuda from rocm
    if isinstance(platforms, str):
        platforms = (platforms,)
    for platform in platforms:
        if platform not in _PLATFORMS:
            hint = "; a GPU is cuda or rocm" if platform == "gpu" else ""
            raise ValueError(f"platforms are {', '.join(_PLATFORMS)}, not {platform!r}{hint}")
    if not platforms:
        raise ValueError(f"platforms is one of {', '.join(_PLATFORMS)} or several, not {platforms!r}")
    return tuple(dict.fromkeys(platforms))


def _refuse_symbolic_rows(model: Any, batch: int | None) -> None:
    """**Raises** `ValueError` for a symbolic batch of a model with arrays of its own per row."""
    per_row = [leaf.name for leaf in leaves(model) if any(dim.name == "batch" for dim in leaf.dims or ())]
    if per_row and batch is None:
        raise ValueError(f"{per_row[0]} has a row for each row of the batch: pass batch, their number")
