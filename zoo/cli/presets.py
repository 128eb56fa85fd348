"""`zoo presets`."""

from zoo.models.presets.published import PRESETS

from .terminal import align_columns


def presets() -> None:
    """List the models of published sizes: name, parameters, family, whose config.json it is.

    `zoo info --preset NAME` shows one, and zoo.models.preset makes it, with new weights.
    """
    rows = [(name, f"{found.parameters:,}", found.family, found.source) for name, found in PRESETS.items()]
    for line in align_columns(rows, right=(1,)):
        print(line)
