"""A checkpoint directory: its path, and the name of its config."""

import os
from pathlib import Path

from zoo._files import explain_wrong_folder

from .hub import download, is_hub_name
from .safetensors import CheckpointError

CONFIG_NAME = "config.json"


def resolve_directory(
    directory: str | Path, revision: str | None = None, *, weights: bool = True, config: str = CONFIG_NAME
) -> Path:
    """Return a directory of a model, or of an adapter with `config="adapter_config.json"`: a path, or a name on the
    Hugging Face hub, which is downloaded.

    A directory of that name wins. Without `weights`, only small files such as the config are downloaded. Names are
    `organization/model` or `organization/model@revision`; see `zoo.weights.hub`.

    **Raises** `CheckpointError` if the directory does not exist and cannot be downloaded, and for one that holds
    something else, such as a run.
    """
    path = Path(directory)
    if os.path.isdir(path):  # unlike `Path.is_dir`, False too for a name that is too long for the file system
        if revision is not None:
            raise CheckpointError(f"{path} is a directory, which has no revision {revision!r}: leave it out")
        if mistake := explain_wrong_folder(path, config):
            raise CheckpointError(mistake)
        return path
    if os.path.exists(path):
        raise CheckpointError(f"{path} is a file: pass the directory that contains it and {CONFIG_NAME}")
    if is_hub_name(str(directory)):
        return download(str(directory), revision, weights=weights)
    raise CheckpointError(
        f"there is no directory {directory}, and names on the Hugging Face hub have the form organization/model"
    )
