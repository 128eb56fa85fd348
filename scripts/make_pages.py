"""Write the pages of the documentation that follow from the code: families, public names, file tree, pictures.

    python scripts/make_pages.py            # writes those that changed
    python scripts/make_pages.py --check    # writes nothing; names those that are stale, and fails if there are any

A test makes the same check, so that no page says what the code no longer does.
"""

import ast
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import equinox as eqx
import jax
import tyro

import zoo
import zoo.train
from scripts.draw_layer import draw
from zoo.cli.devices import make_abstract_mesh, use_cpu
from zoo.cli.families import summarize_family
from zoo.layers import RWKV4, Attention, ClampedGatedMLP, LatentAttention, Mamba, Mamba2, MixtureOfExperts
from zoo.models import ParallelBlock
from zoo.models.hf.config import read_config
from zoo.models.hf.families import FAMILIES
from zoo.models.hf.spec import Config, Family
from zoo.models.presets.published import PRESETS, Preset

ROOT = Path(__file__).parents[1]
COMMAND = "python scripts/make_pages.py"
FOLDERS = ("zoo", "recipes", "scripts")
BARE = {"recipes": "Whole programs of one file, to fork.", "scripts": "Tools around the library."}
"""Folders that are no packages, and what they are."""
ROOMS = (zoo.models, zoo.weights, zoo.layers, zoo.parallel, zoo.ops, zoo.train, zoo.inspect)
NOTE = f"<!-- Written by `{COMMAND}`. -->\n\n"


def tree() -> str:
    """Every source file with the first paragraph of its docstring, every folder with that of its `__init__`."""

    def listing(folder: Path, depth: int) -> Iterator[str]:
        yield f"{'    ' * depth}- **`{folder.name}/`** {caption(folder)}".rstrip()
        inner = sorted({path.relative_to(folder).parts[0] for path in folder.glob("**/*.py")})
        files = [folder / name for name in inner if name.endswith(".py") and name != "__init__.py"]
        for path in sorted(path for name in inner if (path := folder / name).is_dir()):
            yield from listing(path, depth + 1)
        yield from (f"{'    ' * (depth + 1)}- `{path.name}` {caption(path)}" for path in files)

    rows = "\n".join(row for name in FOLDERS for row in listing(ROOT / name, 0))
    return (
        f"# The tree\n\n{NOTE}Every file with what its docstring says first. Imports go down only: `ops < parallel < "
        "layers < models < weights < adapters, train, generate, inspect < cli, recipes, scripts`.\n\n"
        f'<div class="tree" markdown>\n\n{rows}\n\n</div>\n'
    )


def caption(path: Path) -> str:
    """What a file or a folder says of itself. **Raises** `ValueError` for a file without a docstring."""
    if path.is_dir() and path.name in BARE:
        return BARE[path.name]
    file = path / "__init__.py" if path.is_dir() else path
    module = ast.parse(file.read_text(encoding="utf-8"))
    said = first_paragraph(ast.get_docstring(module))
    if not said:
        raise ValueError(f"{file.relative_to(ROOT)} has no docstring: say in its first line what it is")
    if command := re.fullmatch(r"`(?:zoo |zoo\.)(\w+)`\.", said):  # a file of one function: that says more
        body = [x for x in module.body if isinstance(x, ast.FunctionDef) and x.name == command[1]]
        said = " ".join([said[:-1] + ":", *(first_paragraph(ast.get_docstring(x)) for x in body)])
    return said


def first_paragraph(docstring: str | None) -> str:
    return " ".join((docstring or "").partition("\n\n")[0].split())


def families() -> str:
    rows = [
        f"| `{name}` | `{f.architecture}` | {' | '.join(describe_parts(f))} |" for name, f in sorted(FAMILIES.items())
    ]
    by_size = sorted(PRESETS.items(), key=lambda item: (item[1].family, item[1].parameters, item[0]))
    told = [f"- `{name}`: {summarize_family(family)}" for name, family in sorted(FAMILIES.items())]
    return "\n".join(
        [
            f"# Families\n\n{NOTE}The kinds of checkpoints that `zoo.load` reads and `zoo.save` writes, known by the "
            "`model_type` of a `config.json`. [Port a model](port.md) adds one.\n",
            *told,
            "\n## What their layers are made of\n",
            "As the defaults of each family say; a checkpoint's config may change the details.\n",
            "| family | class in transformers | mixer | norm | feed-forward | head |",
            "|---|---|---|---|---|---|",
            *rows,
            "\n## Published sizes\n",
            '`zoo.models.preset("llama3-8b", key=key)` makes a model of such a size with new weights.\n',
            "| preset | family | parameters | for each token | config of |",
            "|---|---|--:|--:|---|",
            *(
                f"| `{name}` | `{p.family}` | {p.parameters:,} | {format_active(p)} | {p.source} |"
                for name, p in by_size
            ),
            "",
        ]
    )


def describe_parts(family: Family) -> tuple[str, str, str, str]:
    """Mixer, norm, feed-forward and head of a family, read off the model that its defaults describe; what has none
    is as in the first of its published sizes."""
    published = next((preset.config for preset in PRESETS.values() if preset.family == family.name), {})
    absent = [key for key, value in read_config(family, {}).items() if value is None]
    config = read_config(family, {key: published[key] for key in absent if key in published})
    small = Config({**config, "num_hidden_layers": 4})  # enough to meet a mixture of experts behind dense layers

    def build(key):
        model = family.build(small, key=key)
        return model, tuple(model.stack.iter_blocks())

    model, (block, *_, last) = eqx.filter_eval_shape(build, jax.random.key(0))
    mixer = block.mixer
    if isinstance(mixer, LatentAttention):
        words = describe_latents(mixer)
    elif isinstance(mixer, Attention):
        words = describe_attention(mixer, config)
    elif isinstance(mixer, Mamba | Mamba2 | RWKV4):
        words = describe_recurrence(mixer)
    else:
        raise NotImplementedError(f"{family.name}: say in {Path(__file__).name} what a {type(mixer).__name__} is")
    norm, ffn = type(block.mixer_norm).__name__, getattr(last, "ffn", None)
    wiring = " beside attention" if isinstance(block, ParallelBlock) else ""
    activation = f", {config['hidden_act']}" if "hidden_act" in config else ""
    fed = "none" if ffn is None else f"`{type(ffn).__name__}`{activation}{wiring}"
    if isinstance(ffn, MixtureOfExperts):
        fed = ", ".join([fed, *describe_mixture(ffn), *["dense layers first"] * (type(block.ffn) is not type(ffn))])
    return ", ".join(words), f"`{norm}`", fed, "the embedding" if model.head is None else "its own"


def format_active(preset: Preset) -> str:
    return "" if preset.active_parameters is None else f"{preset.active_parameters / 1e9:g} billion"


def describe_mixture(ffn: MixtureOfExperts) -> list[str]:
    router = ffn.router
    words = [f"{router.top} of {router.scores.out_size} experts by `{type(router).__name__}`"]
    words += ["each a clamped SwiGLU"] * isinstance(ffn.experts, ClampedGatedMLP)
    return words + [f"{'a gated' if ffn.shared_gate else 'a'} shared expert"] * (ffn.shared is not None)


def describe_attention(mixer: Attention, config: Config) -> list[str]:
    words = ["grouped queries" if "num_key_value_heads" in config else "one key a query"]
    if mixer.rotary is None:
        words.append("learned positions")
    else:
        share = mixer.rotary.dim / mixer.head_dim
        words.append("rotary positions" if share == 1 else f"rotary positions on {share:.0%} of each head")
    together = ", of all heads together" if mixer.norm_over_heads else ""
    words += [f"norms on queries and keys{together}"] * (mixer.query_norm is not None)
    words += ["biases"] * (getattr(mixer.query, "bias", None) is not None)
    words += ["sinks"] * (mixer.sinks is not None)
    return words + ["windows"] * ("sliding_window" in config)


def describe_recurrence(mixer: Mamba | Mamba2 | RWKV4) -> list[str]:
    if isinstance(mixer, RWKV4):
        return [f"`{type(mixer).__name__}`", "a mean whose weights decay"]
    if isinstance(mixer, Mamba2):
        words = [f"{mixer.state_dim} numbers a channel", f"heads in {mixer.B.out_size // mixer.state_dim} groups"]
        return [f"`{type(mixer).__name__}`", *words, f"convolutions of {mixer.x_convolution.width}"]
    words = [f"{mixer.A_log.shape[1]} numbers a channel", f"a convolution of {mixer.convolution.width}"]
    return [f"`{type(mixer).__name__}`", *words, *["norms on steps, B and C"] * (mixer.dt_norm is not None)]


def describe_latents(mixer: LatentAttention) -> list[str]:
    share = mixer.rotary.dim / (mixer.head_dim + mixer.rotary.dim)
    words = ["keys and values made of a latent", f"rotary positions on {share:.0%} of each head"]
    return words + ["queries made of one too"] * (mixer.query is None)


def names() -> str:
    """Every public name with its arguments and the first sentence of its docstring."""
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    promises = changes.partition("## Promised names")[2].partition("\n## ")[0]
    promised = [f"zoo.{name}" for name in re.findall(r"`zoo\.([a-z]\w*(?:\.\w+)*)`", promises)]
    told = {id(resolve_name(name)) for name in promised}
    found = [
        f"# Public names\n\n{NOTE}Each with its arguments and what it says first; its name leads to the rest.\n",
        '<div class="names" markdown>\n',
        "## Promised\n\nThese keep their names and their meaning.\n",
        *map(entry, promised),
    ]
    for room in (zoo, *ROOMS):
        rest = [name for name in list_public_names(room) if id(resolve_name(name)) not in told]
        told |= {id(resolve_name(name)) for name in rest}
        found += [f"\n## {room.__name__}\n\n{first_paragraph(room.__doc__)}\n", *map(entry, rest)]
    return "\n".join([*found, "\n</div>\n"])


def list_public_names(room: ModuleType) -> list[str]:
    """The names of a room: those that it lists; of one that lists none, the functions and classes of its files."""
    if hasattr(room, "__all__"):
        return [
            f"{room.__name__}.{x}"
            for x in room.__all__
            if not x.startswith("_") and not isinstance(getattr(room, x), ModuleType)
        ]
    files = [
        x for _, x in sorted(vars(room).items()) if isinstance(x, ModuleType) and x.__name__.startswith(room.__name__)
    ]
    made = [(file, name, x) for file in files for name, x in vars(file).items() if callable(x)]
    return [f"{file.__name__}.{name}" for file, name, x in made if getattr(x, "__module__", "") == file.__name__]


def resolve_name(name: str) -> Any:
    return functools.reduce(getattr, name.split(".")[1:], zoo)


def entry(name: str) -> str:
    value = resolve_name(name)
    if not inspect.isroutine(value) and not isinstance(value, type):
        return f"- {link(name, None)}"
    said = re.match(r".*?\.(?=\s+[A-Z`*]|$)|.*", first_paragraph(value.__doc__))
    called = f"`({arguments(value)})`" if is_called(value) else ""
    return f"- {link(name, value)}{called}  \n  {said[0] if said else ''}".rstrip()


def is_called(value: Any) -> bool:
    """Whether a reader would write a call of it: what is abstract is derived from, an exception is caught."""
    caught = isinstance(value, type) and issubclass(value, BaseException)
    return not caught and not inspect.isabstract(value) and not getattr(value, "_is_protocol", False)


def link(name: str, value: Any) -> str:
    """To where the reference has it: under its room, if that is shown whole, or under the file that defines it.

    **Raises** `ValueError` for a function or class that the reference does not show.
    """
    shown = re.findall(r"^::: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    room, _, word = name.rpartition(".")
    defined = [x for x in shown if x.startswith(f"{room}.") and x.endswith(f".{word}")]
    if value is not None:
        defined = [x for x in shown if x == f"{value.__module__}.{value.__qualname__}"]
    whole = [name for x in shown if f"{room}.".startswith(f"{x}.") and value is not None]
    if not defined + whole and value is not None:
        raise ValueError(f"docs/api.md does not show {name}: add `::: {value.__module__}.{value.__qualname__}` to it")
    return f"[`{name}`](api.md#{(defined + whole)[0]})" if defined + whole else f"`{name}`"


def arguments(value: Any) -> str:
    """As they are written in a call: names and plain defaults, without types."""
    written, starred = [], False
    for argument in inspect.signature(value).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not starred:
            written.append("*")
        starred |= argument.kind in (argument.KEYWORD_ONLY, argument.VAR_POSITIONAL)
        written.append(f"{STARS.get(argument.kind, '')}{argument.name}{default(argument.default)}")
    return ", ".join(written)


STARS = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}


def default(value: Any) -> str:
    """Only what reads the same in every version of Python and its libraries."""
    if value is inspect.Parameter.empty:
        return ""
    parts = value if isinstance(value, tuple) else (value,)
    plain = all(part is None or isinstance(part, bool | int | float | str) for part in parts)
    return f"={value!r}" if plain else f"={getattr(value, '__name__', '...')}"


def pages() -> dict[str, Callable[[], str]]:
    """Path in the repository -> what is to stand there."""

    def picture(narrow: bool) -> str:
        mesh = make_abstract_mesh(data=1, fsdp=2, tensor=4)
        assert mesh is not None
        return draw(mesh, embed=64, heads=8, kv_heads=4, mlp=128, device=5, narrow=narrow)

    return {
        "docs/families.md": families,
        "docs/names.md": names,
        "docs/pictures/layer.svg": functools.partial(picture, False),
        "docs/pictures/layer-narrow.svg": functools.partial(picture, True),
        "docs/tree.md": tree,
    }


def find_stale() -> dict[str, str]:
    """The pages that are not as they would be written now, with what they should hold."""
    made = {path: make() for path, make in pages().items()}

    def held(path: str) -> str:
        return (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""

    return {path: text for path, text in made.items() if held(path) != text}


def main(*, check: bool = False) -> None:
    """Write the pages that follow from the code.

    Args:
        check: Write nothing; name the pages that are stale, and fail if there are any.
    """
    use_cpu()
    found = find_stale()
    for path, text in found.items():
        print(f"{path} is stale" if check else f"{path} written")
        if not check:
            (ROOT / path).parent.mkdir(exist_ok=True)
            (ROOT / path).write_text(text, encoding="utf-8")
    if check and found:
        sys.exit(f"`{COMMAND}` writes them anew.")


if __name__ == "__main__":
    tyro.cli(main, config=(tyro.conf.FlagCreatePairsOff,))
