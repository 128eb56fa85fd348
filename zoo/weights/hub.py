"""Models and adapters by their names on the Hugging Face hub: `Qwen/Qwen3-0.6B`, or `Qwen/Qwen3-0.6B@REVISION`.

The package `huggingface_hub` downloads into its cache, which other libraries share. Its environment variables hold:
`HF_TOKEN`, `HF_HOME`, `HF_ENDPOINT`, `HF_HUB_OFFLINE`. Only files that this library reads are downloaded, no pickled
weights and no code.
"""

import json
import logging
import re
import shutil
from functools import partial
from pathlib import Path
from types import ModuleType

from zoo._optional import import_optional
from zoo._terminal import format_bytes

from .safetensors import PICKLE_SUFFIXES, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, CheckpointError
from .tokenizer_files import TOKENIZER_FILES

_logger = logging.getLogger("zoo")
_INSTALL = "pip install 'equizoo[hub]'"
_SMALL_FILES = (
    *("config.json", "adapter_config.json", SAFE_WEIGHTS_INDEX_NAME, *TOKENIZER_FILES),
    *("modules.json", "*sentence*.json", "[0-9]_*/config.json", "LICENSE*", "README.md"),
)
"""Patterns of files without weights: configs, the tokenizer, the chat template, modules of sentence-transformers."""
_NOT_READ = ("*.py", *(f"*{suffix}" for suffix in PICKLE_SUFFIXES))
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
    does not exist or that the token may not see, too little room on the disk, and, without a network, for files that
    are not in the cache.
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
    sizes = {}
    silence = None
    try:  # snapshot_download does not say that the hub is silent, and waits two minutes for it
        info = hub.HfApi().model_info(repository, revision=revision, files_metadata=True, timeout=_SECONDS)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    except failures as error:
        _raise_if_refused(hub, error, repository, revision)
        silence = f"the Hugging Face hub does not answer ({_summarize(error)})"
    # Another library may have cached less than the small files.
    small = _SMALL_FILES if silence is None else ("config.json", "adapter_config.json")
    fetch = partial(hub.snapshot_download, repository, ignore_patterns=_NOT_READ, local_files_only=silence is not None)
    try:
        path = Path(fetch(revision=revision, allow_patterns=small))
        if weights:
            files = _list_weights(path, whole=SAFE_WEIGHTS_NAME in sizes)
            _check_room(path, sum(sizes.get(file, 0) for file in files if not (path / file).exists()))
            fetch(revision=path.name, allow_patterns=files)
    except failures as error:
        _raise_if_refused(hub, error, repository, revision)
        if silence is None:
            reason = f"the download of {name} broke off: {_summarize(error)}. The same call resumes it"
        else:
            reason = (
                f"there is no directory {name}, {silence}, and the cache {hub.constants.HF_HUB_CACHE} does not have "
                f"all of it. Where there is a network, `hf download {repository} --local-dir DIRECTORY` makes one"
            )
        raise CheckpointError(reason) from None
    if silence is not None:
        _logger.warning("%s: %s is read from the cache", silence, name)
    _logger.info("%s is commit %s", repository, path.name)
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


def _list_weights(path: Path, *, whole: bool) -> list[str]:
    """Return the names of the files of weights that this library reads: the `whole` one, or the shards of an index."""
    index = path / SAFE_WEIGHTS_INDEX_NAME
    if whole or (path / SAFE_WEIGHTS_NAME).exists() or not index.exists():
        return [SAFE_WEIGHTS_NAME, "adapter_model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError):
        raise CheckpointError(f"{index} is not an index of safetensors files") from None


def _check_room(path: Path, needed: int) -> None:
    """**Raises** `CheckpointError` if the disk of the cache has less room than the files that it lacks."""
    free = shutil.disk_usage(path).free
    if needed > free:
        raise CheckpointError(
            f"{path} needs {format_bytes(needed)} more, and its disk has {format_bytes(free)} free: set HF_HOME to a "
            "folder on another disk"
        )


def _summarize(error: Exception) -> str:
    """Return the first line of an error, or its kind."""
    kind = type(error).__name__
    if kind == "OfflineModeIsEnabled":
        return "HF_HUB_OFFLINE is set"
    lines = str(error).strip().splitlines()
    return f"{kind}: {lines[0][:200]}" if lines else kind
