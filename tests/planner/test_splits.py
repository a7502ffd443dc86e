"""The links between devices, against published scaling, and topologies ranked by them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.native_models import LLAMA, random_weights
from tests.support.rank_threads import HeldWeights
from tokenmill.arch.cost import weight_parts
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import CacheDtypes, KVLayout
from tokenmill.kv.storage import KVStorage
from tokenmill.parallel.cuts import Cuts, cut_model, cut_spec
from tokenmill.parallel.stages import has_tensor
from tokenmill.planner.device import plan_device
from tokenmill.planner.links import LINKS, find_link
from tokenmill.planner.memory import Limits, Split, plan_memory
from tokenmill.planner.model import find_model
from tokenmill.planner.plan import Plan, Question, make_plan
from tokenmill.planner.roofline import EXPOSED_ARITHMETIC, LAYER_S, Speeds
from tokenmill.planner.splits import rank_splits, table_rows, verdict
from tokenmill.weights.rank_weights import RankWeights

# TensorRT-LLM's performance overview, RTX PRO 6000 over PCIe, FP4, 1,000 tokens in and out: tokens a second
QWEN_TENSOR = {1: 9_910, 2: 16_431, 4: 24_046, 8: 31_785}
LLAMA_PIPELINE = {1: 1_787, 2: 3_707, 4: 5_961, 8: 8_166}


def planned(model: str, split: Split) -> Plan:
    device = plan_device("RTX PRO 6000")
    flops = device.peaks.flops_for("fp4") * device.mfu
    bandwidth = device.peaks.bandwidth_bytes_s * device.mbu
    speeds = Speeds(flops, flops, bandwidth, 3e-4, exposed=EXPOSED_ARITHMETIC, layer_s=LAYER_S)
    question = Question(
        input_len=1000, output_len=1000, weight_dtype="nvfp4", kv_dtype="fp8", split=split, max_running=2048,
        token_budget=8192, speeds=speeds,
    )  # fmt: skip
    return make_plan(find_model(model), device, question)


def throughput(model: str, split: Split) -> float:
    best = planned(model, split).best
    assert best is not None
    return best.output_tok_s


@pytest.mark.parametrize(
    ("model", "published", "is_tensor"),
    [
        ("Qwen/Qwen3-30B-A3B", QWEN_TENSOR, True),  # 83, 61, 40 %
        ("meta-llama/Llama-3.3-70B-Instruct", LLAMA_PIPELINE, False),  # 104, 83, 57 %
    ],
)
def test_published_scaling_within_ten_points(model: str, published: dict[int, int], is_tensor: bool) -> None:
    one = throughput(model, Split())
    assert one == pytest.approx(published[1], rel=0.15), "the absolute figure, from peaks alone"
    for devices in (2, 4, 8):
        split = Split(devices, has_sums=True) if is_tensor else Split(1, devices)
        predicted = 100 * throughput(model, split) / one / devices
        measured = 100 * published[devices] / published[1] / devices
        assert abs(predicted - measured) <= 10, f"{devices} devices: {predicted:.0f} %, published {measured:.0f} %"


def test_a_collective_takes_latency_and_bytes() -> None:
    link = find_link("nvlink")
    assert link.sum_s(1e9, 1) == link.gather_s(1e9, 1) == 0.0
    assert link.sum_s(0, 8) == pytest.approx(link.latency_s), "few numbers are read from all others at once"
    share_s = 2 * 7 / 8 * 1e9 / link.bytes_s
    assert link.sum_s(1e9, 8) == pytest.approx(2 * link.latency_s + share_s), "of many each adds up a share"
    assert link.sum_s(1e9, 2) - link.sum_s(0, 2) == pytest.approx(1e9 / link.bytes_s)
    assert link.gather_s(1e9, 4) < link.sum_s(1e9, 4), "a sum sends everything twice"
    with pytest.raises(InvalidConfig, match="nvlink"):
        find_link("string")


def test_a_slower_link_makes_a_tensor_split_slower_and_a_pipeline_hardly() -> None:
    def seconds(link: str, split: Split) -> float:
        plan = planned("meta-llama/Llama-3.3-70B-Instruct", split)
        device = replace(plan.device, linked_by=LINKS[link])
        return replace(plan.roofline, device=device).decode_s(64, 1500)

    assert seconds("ethernet", Split(8)) > 2 * seconds("nvlink", Split(8))
    assert seconds("ethernet", Split(1, 8)) < 1.05 * seconds("nvlink", Split(1, 8))


def test_topologies_are_ranked_with_reasons() -> None:
    """Compared with the simple truth: a model that fits one device is served best by replicas, one that does not by the
    fewest devices it fits; and one request is served soonest by the widest tensor split over a fast link."""
    question = Question(input_len=1000, output_len=200, weight_dtype="bfloat16")
    small = rank_splits(find_model("Qwen/Qwen3-8B"), plan_device("H200"), question, 8)
    assert len(small) == 10
    assert small[0].name == "8 replicas of one device"
    assert "Soonest for one request: tp 8" in verdict(small)
    large = rank_splits(find_model("meta-llama/Llama-3.3-70B-Instruct"), plan_device("H100 SXM"), question, 4)
    alone = next(one for one in large if one.split == Split())
    assert alone.plan is None and "does not fit" in alone.reason and large[-1] is alone
    best = large[0]
    assert best.plan is not None and best.output_tok_s >= max(one.output_tok_s for one in large)
    slow = replace(plan_device("H100 SXM"), linked_by=LINKS["ethernet"])
    over_ethernet = rank_splits(find_model("meta-llama/Llama-3.3-70B-Instruct"), slow, question, 4)
    assert over_ethernet[0].split.pipeline > 1, "stages exchange least"
    widest = next(one for one in over_ethernet if one.split == Split(4))
    assert "exchange over 100 Gbit Ethernet" in widest.reason
    assert len(table_rows(over_ethernet)) == len(over_ethernet)
    assert all(option.flat()["reason"] for option in over_ethernet)


def test_memory_of_the_fullest_rank_is_what_it_allocates() -> None:
    spec = replace(LLAMA, layers=LLAMA.layers[:1] * 5, hidden_size=256, vocab_size=4096)
    limits = Limits(context=256, max_running=4, num_blocks=50)
    weights = random_weights(spec)
    for split in (Split(2), Split(1, 2), Split(2, 2), Split(1, 3)):
        parts = weight_parts(spec, "float32")
        planned = plan_memory(spec, parts, "float16", plan_device("EPYC 9654"), split, limits)
        held, kept = [], []
        for rank in range(split.num_devices):
            stage, place = split.stages(spec)[rank // split.tensor], rank % split.tensor
            cuts = Cuts(place, split.tensor, cut_model(spec, split.tensor) if split.tensor > 1 else {})
            source = RankWeights(HeldWeights(weights), cuts, stage)
            names = [name for name in weights.tensors if has_tensor(spec, stage, name)]
            held.append(sum(source.get(name).data.nbytes for name in names))
            layout = KVLayout.from_spec(cut_spec(spec, split.tensor, place), CacheDtypes("float16")).of_layers(stage)
            kept.append(KVStorage(layout, 50, 16, torch.device("cpu")).num_bytes)
        assert planned.weights == pytest.approx(max(held), rel=0.02), str(split)
        assert planned.kv_pool == max(kept), str(split)
