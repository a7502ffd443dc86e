"""Table of device peaks: memory, bandwidth, dense arithmetic, power, and the price of an hour.

Numbers are the makers' published peaks without sparsity (tensor or matrix units where a device has them, with fp32
accumulation on gaming cards); memory is nominal. CPU rows are one socket: arithmetic is cores × all-core clock ×
operations per cycle, bandwidth is channels × transfer rate. No program reaches a peak: the planner multiplies by the
share that is reached.

Prices are indicative: what an hour of one device was commonly rented for on demand in 2025, in US dollars. They differ
by a factor of three between vendors and change monthly; pass your own price for a real decision.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

GIB, GB, TERA = 1 << 30, 10**9, 1e12
Vendor = Literal["nvidia", "amd", "intel", "apple", "google", "aws", "arm"]
Kind = Literal["gpu", "cpu", "accelerator"]
PeakDType = Literal["fp32", "bf16", "fp8", "int8", "fp4"]  # bf16 stands for fp16 too


@dataclass(frozen=True)
class DevicePeaks:
    name: str
    vendor: Vendor
    kind: Kind
    memory_bytes: int
    bandwidth_bytes_s: float
    flops: dict[str, float] = field(hash=False)  # operations per second by PeakDType; a missing dtype has no fast path
    tdp_w: float
    price_usd_h: float | None = None  # indicative
    aliases: tuple[str, ...] = ()

    def flops_for(self, dtype: PeakDType) -> float:
        """Peak in `dtype`, or in the next wider one the device computes it with."""
        wider: dict[str, tuple[str, ...]] = {"fp4": ("fp8", "bf16"), "fp8": ("bf16",), "int8": ("bf16",), "bf16": ()}
        for candidate in (dtype, *wider.get(dtype, ()), "fp32"):
            if candidate in self.flops:
                return self.flops[candidate]
        raise KeyError(dtype)


def _rows(vendor: Vendor, kind: Kind, *rows: tuple[object, ...]) -> list[DevicePeaks]:
    return [_device(vendor, kind, *row) for row in rows]  # type: ignore[arg-type]  # a test looks at every row


def _device(
    vendor: Vendor, kind: Kind, name: str, memory_gib: float, bandwidth_gb_s: float, fp32: float, bf16: float | None,
    fp8: float | None, int8: float | None, fp4: float | None, tdp_w: float, price: float | None = None, *aliases: str,
) -> DevicePeaks:  # fmt: skip
    table = {"fp32": fp32, "bf16": bf16, "fp8": fp8, "int8": int8, "fp4": fp4}
    flops = {dtype: value * TERA for dtype, value in table.items() if value is not None}
    memory, bandwidth = int(memory_gib * GIB), bandwidth_gb_s * GB
    return DevicePeaks(name, vendor, kind, memory, bandwidth, flops, tdp_w, price, aliases)


NO = None  # no such unit, or no price commonly known
DEVICES: tuple[DevicePeaks, ...] = tuple(
    # name, GiB, GB/s, then TFLOP/s: fp32, bf16/fp16, fp8, int8, fp4, then W, $/h, other names
    _rows(
        "nvidia", "gpu",
        ("T4", 16, 320, 8.1, 65, NO, 130, NO, 70, 0.35, "Tesla T4"),
        ("V100 16GB", 16, 900, 15.7, 125, NO, NO, NO, 300, 0.6, "Tesla V100-SXM2-16GB"),
        ("V100 32GB", 32, 900, 15.7, 125, NO, NO, NO, 300, 0.8, "Tesla V100-SXM2-32GB", "V100"),
        ("A10", 24, 600, 31.2, 125, NO, 250, NO, 150, 0.75),
        ("A10G", 24, 600, 31.5, 70, NO, 140, NO, 300, 1.0),
        ("A30", 24, 933, 10.3, 165, NO, 330, NO, 165, NO),
        ("A40", 48, 696, 37.4, 149.7, NO, 299.3, NO, 300, 0.45),
        ("A100 40GB", 40, 1555, 19.5, 312, NO, 624, NO, 400, 1.3, "A100-SXM4-40GB", "A100-PCIE-40GB"),
        ("A100 80GB PCIe", 80, 1935, 19.5, 312, NO, 624, NO, 300, 1.6, "A100-PCIE-80GB"),
        ("A100 80GB SXM", 80, 2039, 19.5, 312, NO, 624, NO, 400, 1.8, "A100-SXM4-80GB", "A100", "A100 80GB"),
        ("L4", 24, 300, 30.3, 121, 242, 242, NO, 72, 0.7),
        ("L40", 48, 864, 90.5, 181, 362, 362, NO, 300, 0.9),
        ("L40S", 48, 864, 91.6, 362, 733, 733, NO, 350, 1.0),
        ("RTX 3060", 12, 360, 12.7, 25.6, NO, 102, NO, 170, NO),
        ("RTX 3090", 24, 936, 35.6, 71, NO, 284, NO, 350, 0.25),
        ("RTX 4060 Ti 16GB", 16, 288, 22.1, 44, 88, 177, NO, 165, NO),
        ("RTX 4080", 16, 717, 48.7, 97.5, 195, 390, NO, 320, 0.3),
        ("RTX 4090", 24, 1008, 82.6, 165.2, 330.3, 660.6, NO, 450, 0.4),
        ("RTX 5080", 16, 960, 56.3, 112.6, 225.1, 450.2, 900.4, 360, NO),
        ("RTX 5090", 32, 1792, 104.8, 209.5, 419, 838, 1676, 575, 0.7),
        ("RTX A6000", 48, 768, 38.7, 154.8, NO, 309.7, NO, 300, 0.5),
        ("RTX 6000 Ada", 48, 960, 91.1, 364.2, 728.5, 728.5, NO, 300, 0.8, "RTX 6000 Ada Segment"),
        ("RTX PRO 6000", 96, 1792, 125, 503.8, 1007.6, 1007.6, 2015, 600, 1.8, "RTX PRO 6000 Blackwell",
         "RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000 Blackwell Server Edition"),
        ("H20", 96, 4000, 44, 148, 296, 296, NO, 400, NO),
        ("H100 PCIe", 80, 2039, 51.2, 756, 1513, 1513, NO, 350, 2.0),
        ("H100 SXM", 80, 3352, 67, 989.4, 1978.9, 1978.9, NO, 700, 2.5, "H100 80GB HBM3", "H100"),
        ("H100 NVL", 94, 3938, 60, 835.5, 1670.9, 1670.9, NO, 400, 2.6),
        ("H200 SXM", 140, 4800, 67, 989.4, 1978.9, 1978.9, NO, 700, 3.5, "H200"),
        ("H200 NVL", 140, 4800, 60, 835.5, 1670.9, 1670.9, NO, 600, 3.2),
        ("GH200 96GB", 96, 4000, 67, 989.4, 1978.9, 1978.9, NO, 1000, 2.0, "GH200 480GB", "GH200"),
        ("GH200 144GB", 144, 4900, 67, 989.4, 1978.9, 1978.9, NO, 1000, NO, "GH200 144G HBM3e"),
        ("B200", 180, 8000, 75, 2250, 4500, 4500, 9000, 1000, 5.0),
        ("GB200", 186, 8000, 80, 2500, 5000, 5000, 10000, 1200, NO),
        ("B300", 270, 8000, 75, 2250, 4500, 150, 13500, 1400, NO),
        ("Jetson AGX Orin 64GB", 64, 204.8, 5.3, 42.5, NO, 85, NO, 60, NO, "Orin"),
        ("DGX Spark", 128, 273, 31, 125, 250, 250, 500, 140, NO, "GB10"),
    )
    + _rows(
        "amd", "gpu",
        ("MI100", 32, 1229, 46.1, 184.6, NO, 184.6, NO, 300, NO),
        ("MI210", 64, 1638, 45.3, 181, NO, 181, NO, 300, NO, "Instinct MI210"),
        ("MI250X", 128, 3277, 95.7, 383, NO, 383, NO, 560, NO, "Instinct MI250X"),
        ("MI300A", 128, 5300, 122.6, 980.6, 1961.2, 1961.2, NO, 760, NO),
        ("MI300X", 192, 5300, 163.4, 1307.4, 2614.9, 2614.9, NO, 750, 2.0, "Instinct MI300X"),
        ("MI325X", 256, 6000, 163.4, 1307.4, 2614.9, 2614.9, NO, 1000, 2.3, "Instinct MI325X"),
        ("MI350X", 288, 8000, 144.2, 2306.9, 4613.7, 4613.7, 9227.5, 1000, NO),
        ("MI355X", 288, 8000, 157.3, 2516.6, 5033.2, 5033.2, 10066.3, 1400, 3.0, "Instinct MI355X"),
        ("RX 7900 XTX", 24, 960, 61.4, 122.8, NO, 122.8, NO, 355, NO),
    )
    + _rows(
        "intel", "accelerator",
        ("Gaudi 2", 96, 2450, 11, 432, 865, NO, NO, 600, 1.3),
        ("Gaudi 3", 128, 3700, 14, 1678, 1678, NO, NO, 900, 1.9),
        ("Max 1550", 128, 3277, 52, 832, NO, 1664, NO, 600, NO, "Data Center GPU Max 1550"),
    )
    + _rows(
        "google", "accelerator",
        ("TPU v5e", 16, 819, 98, 197, NO, 394, NO, 200, 1.2),
        ("TPU v5p", 95, 2765, 229, 459, NO, 918, NO, 500, 4.2),
        ("TPU v6e", 32, 1640, 459, 918, NO, 1836, NO, 300, 2.7, "Trillium"),
    )
    + _rows(
        "aws", "accelerator",
        ("Inferentia2", 32, 820, 47.5, 190, NO, 380, NO, 175, 0.76),
        ("Trainium2", 96, 2900, 181, 667, 1299, NO, NO, 500, NO),
    )
    + _rows(
        "apple", "gpu",  # memory is shared with the CPU: the largest configuration
        ("M1", 16, 68.25, 2.6, 2.6, NO, NO, NO, 20, NO, "Apple M1"),
        ("M1 Pro", 32, 200, 5.2, 5.2, NO, NO, NO, 40, NO, "Apple M1 Pro"),
        ("M1 Max", 64, 400, 10.4, 10.4, NO, NO, NO, 60, NO, "Apple M1 Max"),
        ("M1 Ultra", 128, 800, 20.8, 20.8, NO, NO, NO, 120, NO, "Apple M1 Ultra"),
        ("M2", 24, 100, 3.6, 3.6, NO, NO, NO, 22, NO, "Apple M2"),
        ("M2 Pro", 32, 200, 6.8, 6.8, NO, NO, NO, 40, NO, "Apple M2 Pro"),
        ("M2 Max", 96, 400, 13.6, 13.6, NO, NO, NO, 70, NO, "Apple M2 Max"),
        ("M2 Ultra", 192, 800, 27.2, 27.2, NO, NO, NO, 140, NO, "Apple M2 Ultra"),
        ("M3", 24, 100, 3.5, 3.5, NO, NO, NO, 22, NO, "Apple M3"),
        ("M3 Pro", 36, 150, 6.4, 6.4, NO, NO, NO, 40, NO, "Apple M3 Pro"),
        ("M3 Max", 128, 400, 14.1, 14.1, NO, NO, NO, 78, NO, "Apple M3 Max"),
        ("M3 Ultra", 512, 819, 28.2, 28.2, NO, NO, NO, 150, NO, "Apple M3 Ultra"),
        ("M4", 32, 120, 4.3, 4.3, NO, NO, NO, 22, NO, "Apple M4"),
        ("M4 Pro", 64, 273, 9.2, 9.2, NO, NO, NO, 46, NO, "Apple M4 Pro"),
        ("M4 Max", 128, 546, 18.4, 18.4, NO, NO, NO, 90, NO, "Apple M4 Max"),
    )
    + _rows(
        "intel", "cpu",
        ("Xeon 8380", 512, 205, 5.9, NO, NO, 23.6, NO, 270, NO, "Xeon Platinum 8380", "Ice Lake"),
        ("Xeon 8480+", 512, 307, 7.2, 115, NO, 229, NO, 350, 1.5, "Xeon Platinum 8480+", "Sapphire Rapids"),
        ("Xeon 8592+", 512, 358, 7.8, 125, NO, 249, NO, 350, NO, "Xeon Platinum 8592+", "Emerald Rapids"),
        ("Xeon 6980P", 768, 845, 16.4, 262, NO, 524, NO, 500, NO, "Granite Rapids"),
        ("Core i9-14900K", 64, 89.6, 2.3, NO, NO, 9.2, NO, 253, NO),
    )
    + _rows(
        "amd", "cpu",
        ("EPYC 7763", 512, 205, 5.0, NO, NO, NO, NO, 280, 1.2, "Milan"),
        ("EPYC 9654", 768, 461, 7.4, 14.7, NO, 29.5, NO, 360, 1.8, "Genoa"),
        ("EPYC 9755", 768, 614, 22.1, 44.2, NO, 88.5, NO, 500, NO, "Turin"),
        ("Ryzen 9 7950X", 64, 83.2, 2.3, 4.6, NO, 9.2, NO, 170, NO),
        ("Ryzen 9 9950X", 96, 89.6, 4.4, 8.8, NO, 17.6, NO, 170, NO),
        ("Ryzen AI Max+ 395", 128, 256, 2.6, 5.1, NO, 10.2, NO, 120, NO),
    )
    + _rows(
        "arm", "cpu",
        ("Graviton3", 256, 307, 5.3, 21.3, NO, 42.6, NO, 100, 2.3),
        ("Graviton4", 768, 538, 8.6, 34.4, NO, 68.8, NO, 130, 4.2),
        ("Ampere Altra Max", 512, 205, 6.1, 12.3, NO, 24.6, NO, 250, NO),
    )
)  # fmt: skip


def find_device(name: str) -> DevicePeaks | None:
    """The device of that name or alias; a driver's spelling ("NVIDIA H200", "Apple M2 Pro") will do."""
    wanted = _plain(name)
    for device in DEVICES:
        if wanted in {_plain(spelling) for spelling in (device.name, *device.aliases)}:
            return device
    return None


def device_names() -> list[str]:
    return [device.name for device in DEVICES]


def _plain(name: str) -> str:
    words = re.sub(
        r"\((r|tm)\)|\b(nvidia|geforce|amd|intel|tesla|instinct|oam|radeon|processor|cpu)\b|@.*", " ", name.lower()
    )
    return re.sub(r"[^a-z0-9+]+", "", re.sub(r"\d+-core", "", words))
