"""Gated group norm. Its values on one device and on a mesh are tested with Mamba-2."""

import pytest

from zoo.layers.recurrent.gated_norm import GatedGroupNorm


def test_gated_group_norm_rejects_uneven_groups():
    with pytest.raises(ValueError, match="4 heads do not divide evenly over 3 groups"):
        GatedGroupNorm(4, 2, 3)
