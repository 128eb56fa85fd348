"""Implement `zoo presets`."""

from zoo._terminal import align_columns, show
from zoo.models.presets.published import PRESETS


def presets() -> None:
    """List presets, models of published sizes: name, parameters, family, source of the config.json.

    `zoo info --preset NAME` shows a preset; zoo.models.preset(NAME) builds it with random weights.
    """
    rows = [(name, f"{preset.parameters:,}", preset.family, preset.source) for name, preset in PRESETS.items()]
    for line in align_columns(rows, right=(1,)):
        show(line)
