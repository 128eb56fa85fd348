"""The rule by which "auto" chooses between the scan over layers and the plain loop."""

import pytest

from zoo.models.loop import MAX_PLAIN_LAYERS, MIN_PLAIN_SIZE, check_loop, find_drawback, select_loop
from zoo.ops.platform import target_platform

LARGE = {"layers": 8, "remat": "none", "size": MIN_PLAIN_SIZE}


@pytest.mark.parametrize(
    "platform, change, loop",
    [
        ("cpu", {}, "plain"),
        ("gpu", {}, "scan"),
        ("tpu", {}, "scan"),
        ("cpu", {"size": MIN_PLAIN_SIZE - 1}, "scan"),
        ("cpu", {"remat": "elementwise"}, "plain"),
        ("cpu", {"remat": "dots"}, "scan"),
        ("cpu", {"layers": MAX_PLAIN_LAYERS + 1}, "scan"),
    ],
)
def test_auto_is_the_plain_loop_for_large_shallow_steps_on_a_cpu(platform, change, loop):
    with target_platform(platform):
        assert select_loop("auto", **(LARGE | change)) == loop
        assert [select_loop(named, **(LARGE | change)) for named in ("scan", "plain", 3)] == ["scan", "plain", 3]


def test_drawback_says_what_stands_against_the_plain_loop():
    with target_platform("tpu"):
        assert find_drawback(8, "none") == "compiled for a tpu"
    with target_platform("cpu"):
        assert find_drawback(8, "none") is None
        assert find_drawback(8, "full") == "remat=full"
        assert find_drawback(100, "none") == f"100 layers, more than {MAX_PLAIN_LAYERS}"


def test_check_loop_names_the_loops():
    assert [check_loop(loop) for loop in ("auto", "scan", "plain", 4)] == ["auto", "scan", "plain", 4]
    for loop in ("unrolled", 0, True):
        with pytest.raises(
            ValueError, match="one of auto, scan, ahead, plain or a number of repeats per iteration, not"
        ):
            check_loop(loop)
