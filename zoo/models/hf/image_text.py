"""Checkpoints of language models that read images: a config within the config for the encoder of images and for the
language model, and the names of both and of the projector between them."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Key

from ..image_places import AbstractPlaces, CausalPlaces
from ..image_text import ImageText
from .config import read_config
from .errors import ConfigError
from .kinds import COUNT, Default
from .spec import Config, Family, NameMap, omit, prefixed
from .towers import TABLE, read_tower
from .values import BOOL, POSITIVE_NUMBER, integer, optional
from .wrappers import PLAIN_LOGITS, TEXT_CONFIG, TIE, Wrapper, read_inner_config

VISION_CONFIG = "vision_config"
_ROPE_KINDS = {
    "rope_theta": POSITIVE_NUMBER,
    "rope_scaling": TABLE,
    "partial_rotary_factor": POSITIVE_NUMBER,
    "original_max_position_embeddings": COUNT,
}
"""Keys of RoPE at the top of older files; newer ones have `rope_parameters` within the config of the text."""
_TOWER_BASE = "vision_model."
"""Beginning of the names of towers that are models by themselves, which some files leave out."""


@dataclasses.dataclass(frozen=True)
class Prefixes:
    """Beginnings of the tensor names of each part, in one kind of files."""

    base: str
    """Stands for the `model.` of the language model."""
    tower: str
    projector: str
    head: str = "lm_head"

    def fit(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Return True for the names of such files."""
        parts = (self.base, f"{self.tower}.", f"{self.projector}.")
        return all(any(name.startswith(part) for name in names) for part in parts)

    def fit_untied(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        """Return True for the names of such files with a head of their own, where the config does not mention it."""
        return self.fit(config, names) and config.get(TIE) is None and f"{self.head}.weight" in names

    def rename(self, name: str) -> str:
        """Return the name in such files of a tensor of the language model."""
        if name.startswith("model."):
            return self.base + name.removeprefix("model.")
        return self.head + name.removeprefix("lm_head")


_OUTER = {"projector": "multi_modal_projector", "head": "language_model.lm_head"}
PREFIXES = (
    Prefixes("language_model.model.", "vision_tower.vision_model", **_OUTER),
    Prefixes("language_model.model.", "vision_tower", **_OUTER),
    Prefixes("model.language_model.", "model.vision_tower.vision_model", "model.multi_modal_projector"),
    Prefixes("model.language_model.", "model.vision_tower", "model.multi_modal_projector"),
)
"""Those of most files of the hub, and the classes' own; of towers with and without the name of their model."""


def _place_causally(config: Config) -> AbstractPlaces:
    return CausalPlaces()


def _read_all(config: Config) -> int:
    return 0


def _add_nothing(config: Config, tower: Config) -> Mapping[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class ImageTextFacts:
    """Facts about the checkpoints of language models that read images.

    - `wrapper`: the language model within them, as for those that are read as their text.
    - `towers`: families of the encoder of images, by the `model_type` of `vision_config`; the first is the default.
    - `projector(config, tower, text, *, key)` builds the projector, from the config, and the configs of tower and text.
    - `projector_names(tower)`: its names in files -> in the module, for the config of a tower.
    - `image_keys`: config keys of the token ids that stand for features, with the defaults of the class.
    - `places(config)`: the rule of the places of images.
    - `unread(config)`: the number of the last layers of the tower that nothing reads.
    - `ignored_text_keys`: keys of `text_config` that the other facts say.
    - `texts`: families of the language model besides those that are read alone, by their `model_type`.
    - `text_options(config, tower)`: further values for the builder of the language model.
    - `flat`: True if files may have the keys of the language model at the top of the config.
    """

    wrapper: Wrapper
    towers: Mapping[str, Family]
    projector: Callable[..., Any]
    projector_names: Callable[[Config], NameMap]
    image_keys: Mapping[str, int]
    places: Callable[[Config], AbstractPlaces] = _place_causally
    unread: Callable[[Config], int] = _read_all
    ignored_text_keys: tuple[str, ...] = ()
    texts: Mapping[str, Family] = dataclasses.field(default_factory=dict)
    text_options: Callable[[Config, Config], Mapping[str, Any]] = _add_nothing
    flat: bool = False

    def list_flat_keys(self) -> dict[str, Default]:
        """Return the keys of the language model that files may have at the top of the config."""
        if not self.flat:
            return {}
        family = self.texts[self.wrapper.text]
        kinds = {**family.kinds, **{alias: family.kinds[key] for alias, key in family.aliases.items()}, **_ROPE_KINDS}
        del kinds[TIE]
        return {key: Default(None, optional(kind)) for key, kind in kinds.items()}

    def read_text(self, config: Config) -> tuple[Family, Config]:
        """Return the family and the config of the language model. **Raises** `ConfigError` as `read_config` does."""
        from .families import get_family  # which imports this module

        given = {key: config[key] for key in self.list_flat_keys() if config[key] is not None}
        inner = {**given, **(config[TEXT_CONFIG] or {})}
        text = read_inner_config({**config, TEXT_CONFIG: inner}, self.wrapper)
        family = self.texts.get(text["model_type"]) or get_family(text["model_type"])
        if family is None:
            raise ConfigError(f"{TEXT_CONFIG}: there is no family {text['model_type']!r}")
        if not self.wrapper.scales_logits:
            text.update({key: value for key, value in PLAIN_LOGITS.items() if key in family.defaults})
        options = self.text_options(config, self.read_tower(config)[1])
        try:
            return family, Config(read_config(family, omit(text, "architectures", *self.ignored_text_keys)), **options)
        except ConfigError as error:
            raise ConfigError(f"{TEXT_CONFIG}: {error}") from None

    def read_tower(self, config: Config) -> tuple[Family, Config]:
        """Return the family and the config of the tower. **Raises** `ConfigError` as `read_config` does."""
        given = config[VISION_CONFIG] or {}
        name = given.get("model_type", next(iter(self.towers)))
        if name not in self.towers:
            raise ConfigError(f"{VISION_CONFIG}: model_type = {name!r}, and towers are {', '.join(self.towers)}")
        family = self.towers[name]
        tower = read_tower(Config({VISION_CONFIG: omit(given, "model_type")}), family, VISION_CONFIG)
        return family, Config(tower, unread_layers=self.unread(config))

    def build(self, config: Config, *, key: Key[Array, ""]) -> ImageText:
        """Build the model of a config."""
        tower_key, projector_key, decoder_key = jax.random.split(key, 3)
        tower, tower_config = self.read_tower(config)
        text, text_config = self.read_text(config)
        return ImageText(
            tower=tower.build(tower_config, key=tower_key),
            projector=self.projector(config, tower_config, text_config, key=projector_key),
            decoder=text.build(text_config, key=decoder_key),
            image_tokens=tuple(config[name] for name in self.image_keys),
            places=self.places(config),
        )

    def map_names(self, prefixes: Prefixes, config: Config) -> NameMap:
        """Return the name map of a config's files."""
        tower, tower_config = self.read_tower(config)
        text, text_config = self.read_text(config)
        texts = {prefixes.rename(name): mapping for name, mapping in text.names(text_config).items()}
        towers = {name.removeprefix(_TOWER_BASE): mapping for name, mapping in tower.names(tower_config).items()}
        return {
            **prefixed("", "decoder", texts),
            **prefixed(prefixes.tower, "tower", towers),
            **prefixed(prefixes.projector, "projector", self.projector_names(tower_config)),
        }


def make_image_text_family(
    name: str,
    architecture: str,
    facts: ImageTextFacts,
    *,
    defaults: Mapping[str, Any] | None = None,
    prefixes: Sequence[Prefixes] = PREFIXES,
    **options: Any,
) -> Family:
    """Make the family of checkpoints with these facts, with a variant for each kind of names, and for a head that the
    config does not mention. Options are as in `Family`."""
    keys = {
        **facts.list_flat_keys(),
        **dict.fromkeys((TEXT_CONFIG, VISION_CONFIG), Default({}, optional(TABLE))),
        **{key: Default(value, integer(minimum=0)) for key, value in facts.image_keys.items()},
        **(defaults or {}),
    }

    def make(names: Prefixes, tie: bool | None, fits: Callable[..., bool] | None) -> Family:
        return Family(
            name=name,
            architecture=architecture,
            build=facts.build,
            names=partial(facts.map_names, names),
            defaults={**keys, TIE: Default(tie, optional(BOOL))},
            head=names.head,
            embedding=f"{names.base}embed_tokens",
            fits=fits,
            **options,
        )

    variants = []
    for names in prefixes:
        variants += [make(names, False, names.fit_untied), make(names, None, names.fit)]
    return dataclasses.replace(make(prefixes[0], None, None), variants=tuple(variants))
