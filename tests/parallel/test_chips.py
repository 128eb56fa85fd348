"""Chips by the names that JAX gives to devices."""

from types import SimpleNamespace

import jax
import pytest

from tests.aot import imagine
from zoo.parallel.chips import CHIPS, count_domain, find_chip


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "tpu7x"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA A10G", None),
        ("TPU v4", None),
        ("cpu", None),
    ],
)
def test_chip_of_a_device_kind(kind, name):
    found = find_chip(SimpleNamespace(device_kind=kind))
    assert found is CHIPS.get(name)


def test_domain_is_the_slice():
    def make(**numbers):
        return SimpleNamespace(platform="gpu", client=None, **numbers)

    hosts = [make(slice_index=number // 8, process_index=number) for number in range(16)]  # a process per GPU
    assert count_domain(hosts) == 8 and count_domain(hosts[4:8]) == 4
    assert count_domain([make(process_index=number) for number in range(4)]) == 4
    assert count_domain(jax.devices("cpu")) == 8


@pytest.mark.aot
@pytest.mark.parametrize(
    ("topology", "name", "domain"),
    [("h100:8", "h100", 8), ("h100:2x8", "h100", 8), ("v5e:2x4", "v5e", 8), ("v5p:2x2x1*2", "v5p", 4)],
)
def test_chips_that_are_not_here(topology, name, domain):
    devices = imagine(topology)
    assert find_chip(devices[0]) is CHIPS[name] and count_domain(devices) == domain
