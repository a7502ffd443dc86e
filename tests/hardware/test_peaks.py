"""The table is complete, unambiguous and physically plausible."""

from __future__ import annotations

import pytest

from tokenmill.hardware.peaks import DEVICES, device_names, find_device


def test_enough_devices_with_unambiguous_names() -> None:
    assert len(DEVICES) >= 40
    for device in DEVICES:
        for spelling in (device.name, *device.aliases):
            assert find_device(spelling) is device, spelling
    assert len(set(device_names())) == len(DEVICES)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("Apple M2 Pro", "M2 Pro"),
        ("AMD EPYC 9654 96-Core Processor", "EPYC 9654"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Xeon 8480+"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_driver_spellings(spelling: str, name: str) -> None:
    found = find_device(spelling)
    assert found is not None and found.name == name


def test_unknown_devices_are_unknown() -> None:
    assert find_device("Voodoo 2") is None and find_device("") is None


def test_numbers_are_plausible() -> None:
    for device in DEVICES:
        assert 50e9 <= device.bandwidth_bytes_s <= 10e12, device.name
        assert 8 << 30 <= device.memory_bytes <= 1 << 40, device.name
        assert 10 <= device.tdp_w <= 1500, device.name
        assert device.price_usd_h is None or 0.1 < device.price_usd_h < 20, device.name
        assert device.flops["fp32"] <= device.flops_for("bf16"), device.name
        assert device.flops_for("bf16") <= device.flops_for("fp8") <= device.flops_for("fp4"), device.name
        # a peak that no memory could ever feed points to a mistyped unit
        assert 5 < device.flops_for("bf16") / device.bandwidth_bytes_s < 1200, device.name


def test_a_missing_dtype_falls_back_to_the_next_wider() -> None:
    t4 = find_device("T4")
    assert t4 is not None and t4.flops_for("fp4") == t4.flops["bf16"]
    epyc = find_device("EPYC 7763")
    assert epyc is not None and epyc.flops_for("int8") == epyc.flops["fp32"]
