"""Models and adapters by their names on the Hugging Face hub: `Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@REVISION`.

The package `huggingface_hub` downloads into its cache, which other libraries share. Its environment variables hold:
`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`. Only files that this library reads are downloaded, no pickled
weights and no code.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from zoo._optional import import_optional
from zoo._terminal import format_bytes

from .safetensors import PICKLE_SUFFIXES, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, CheckpointError
from .tokenizer_files import TOKENIZER_FILES

_logger = logging.getLogger("zoo")
_INSTALL = "pip install 'equizoo[hub]'"
_CONFIGS = ("config.json", "adapter_config.json")
"""A snapshot with one of these is a model, or an adapter."""
_WEIGHTS = (SAFE_WEIGHTS_NAME, "adapter_model.safetensors")
_SMALL_FILES = (
    *("config.json", "adapter_config.json", SAFE_WEIGHTS_INDEX_NAME, *TOKENIZER_FILES),
    *("modules.json", "*sentence*.json", "[0-9]_*/config.json", "LICENSE*", "README.md"),
)
"""Patterns of files without weights: configs, the tokenizer, the chat template, modules of sentence-transformers."""
_NAME = re.compile(r"(?P<repository>[\w-][\w.-]*/[\w-][\w.-]*)(@(?P<revision>[\w.-][\w./-]*))?")
_SECONDS = 20.0
"""Timeout of the first request."""


def is_hub_name(name: str) -> bool:
    """Return True for `organization/model` and `organization/model@revision`."""
    return _NAME.fullmatch(name) is not None


def download(name: str, revision: str | None = None, *, weights: bool = True) -> Path:
    """Return the directory in the cache that holds a model or adapter of the hub, after downloading what it lacks.

    `name` is `organization/model`, with `@revision` behind it or in `revision`: a branch, a tag or a commit. Without a
    network the newest cached commit of the revision is taken, with a line in the log. A download that breaks off is
    resumed by the next call. Without `weights`, only the config, the tokenizer and other small files are downloaded.

    **Raises** `ImportError` without the package `huggingface_hub`; `CheckpointError` for a repository or revision that
    does not exist or that the token may not see, one without safetensors, too little room on the disk, and, without a
    network, for files that are not in the cache.
    """
    found = _NAME.fullmatch(name)
    assert found is not None
    repository = found["repository"]
    if revision is not None and found["revision"] not in (None, revision):
        raise ValueError(f"{name} and revision={revision!r} are two revisions: pass one of them")
    revision = found["revision"] or revision
    for module in ("huggingface_hub.constants", "huggingface_hub.errors"):
        import_optional(module, _INSTALL)
    hub = import_optional("huggingface_hub", _INSTALL)
    failures = hub.errors.HTTPError, hub.errors.HFValidationError, OSError
    try:
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_SECONDS)
    except failures as error:
        _raise_if_refused(hub, error, repository, revision)
        return _find_cached(hub, repository, revision, error, weights)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    options = {"repo_id": repository, "revision": revision}
    try:
        plain = [file for file in sizes if not file.endswith((*PICKLE_SUFFIXES, ".py"))]
        files = [file for file in plain if any(fnmatchcase(file, pattern) for pattern in _SMALL_FILES)]
        if weights:
            files += _list_weights(hub, sizes, options)
        _check_room(hub, sizes, files, options | {"revision": info.sha})
        path = Path(hub.snapshot_download(**options, allow_patterns=files))
    except failures as error:
        _raise_if_refused(hub, error, repository, revision)
        raise CheckpointError(
            f"the download of {repository} broke off: {_summarize(error)}. The same call resumes it"
        ) from None
    _logger.info("%s is commit %s", repository, info.sha)
    return path


def _raise_if_refused(hub: ModuleType, error: Exception, repository: str, revision: str | None) -> None:
    """**Raises** `CheckpointError` if the hub has answered that it does not have, or does not show, a model."""
    if isinstance(error, hub.errors.GatedRepoError):
        page = f"{hub.HfApi().endpoint}/{repository}"
        reason = f"{repository} is gated: accept its license at {page}, then run `hf auth login` or set HF_TOKEN"
    elif isinstance(error, hub.errors.RepositoryNotFoundError | hub.errors.HFValidationError):
        reason = (
            f"there is no directory {repository}, and no model {repository} on the Hugging Face hub. For a private one "
            "run `hf auth login` or set HF_TOKEN"
        )
    elif isinstance(error, hub.errors.RevisionNotFoundError):
        reason = f"{repository} has no revision {revision!r} on the Hugging Face hub"
    else:
        return
    raise CheckpointError(reason) from None


def _list_weights(hub: ModuleType, sizes: Mapping[str, int], options: Mapping[str, Any]) -> list[str]:
    """Return the files of weights that this library reads. **Raises** `CheckpointError` without safetensors."""
    weights = [name for name in _WEIGHTS if name in sizes]
    if SAFE_WEIGHTS_NAME not in sizes and SAFE_WEIGHTS_INDEX_NAME in sizes:
        index = Path(hub.hf_hub_download(**options, filename=SAFE_WEIGHTS_INDEX_NAME))
        weights += _list_shards(index)
    if not weights:
        others = [name for name in sizes if name.endswith((".bin", ".pt", ".pth", ".gguf", ".safetensors"))]
        held = f"only {', '.join(others[:3])}" if others else "no weights"
        raise CheckpointError(
            f"{options['repo_id']} has {held} on the Hugging Face hub, and {SAFE_WEIGHTS_NAME} or "
            f"{SAFE_WEIGHTS_INDEX_NAME} is read"
        )
    return weights


def _list_shards(index: Path) -> list[str]:
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is not an index of safetensors files") from None


def _check_room(hub: ModuleType, sizes: Mapping[str, int], files: Collection[str], options: Mapping[str, Any]) -> None:
    """**Raises** `CheckpointError` if the disk of the cache has less room than the files that it lacks."""
    missing = [file for file in files if hub.try_to_load_from_cache(**options, filename=file) is None]
    needed = sum(sizes.get(file, 0) for file in missing)
    cache = _get_cache(hub)
    existing = next(folder for folder in (cache, *cache.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CheckpointError(
            f"{options['repo_id']} needs {format_bytes(needed)} more in {cache}, which has {format_bytes(free)} free: "
            "set HF_HOME to a folder on another disk"
        )


def _find_cached(hub: ModuleType, repository: str, revision: str | None, error: Exception, weights: bool) -> Path:
    """Return the cached directory of a repository. **Raises** `CheckpointError`, with what is cached, if it is not
    there, or only in part."""
    found = [hub.try_to_load_from_cache(repository, name, revision=revision) for name in _CONFIGS]
    folders = [Path(path).parent for path in found if isinstance(path, str)]
    wanted = repository if revision is None else f"{repository}@{revision}"
    if not folders:
        _raise_uncached(hub, wanted, f"{wanted} is not in the cache {_get_cache(hub)}", error)
    folder = folders[0]
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    shards = _list_shards(index) if index.exists() else []
    is_whole = any((folder / name).exists() for name in _WEIGHTS)
    if weights and not is_whole and not (shards and all((folder / name).exists() for name in shards)):
        _raise_uncached(hub, wanted, f"only a part of {wanted} is in the cache {_get_cache(hub)}", error)
    _logger.warning("the Hugging Face hub does not answer (%s): %s is read from the cache", _summarize(error), wanted)
    return folder


def _raise_uncached(hub: ModuleType, wanted: str, problem: str, error: Exception) -> NoReturn:
    cached = sorted(path.name.removeprefix("models--").replace("--", "/") for path in _get_cache(hub).glob("models--*"))
    held = f" It has {', '.join(cached[:8])}{', ...' if cached[8:] else ''}." if cached else ""
    raise CheckpointError(
        f"there is no directory {wanted}, the Hugging Face hub does not answer ({_summarize(error)}), and {problem}."
        f"{held} Where there is a network, `hf download {wanted.partition('@')[0]} --local-dir DIRECTORY` makes a "
        "directory to copy"
    ) from None


def _summarize(error: Exception) -> str:
    """Return the first line of an error, or its kind."""
    kind = type(error).__name__
    if kind == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set"
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0][:200]}" if lines else kind


def _get_cache(hub: ModuleType) -> Path:
    return Path(os.path.expanduser(hub.constants.HF_HUB_CACHE))
