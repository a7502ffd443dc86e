"""The regions of a layer, as data: what is computed over the residual stream, in order, and with which weights.

    NormProject   normed stream × matrices with a common input                 → activations
    Attend        the mixer: activations of each token meet those before it    → activations
    ProjectAdd    activations × matrix (→ norm), added to the stream           → stream
    GatedMlp      norm → down(act(gate) * up) (→ norm), added to the stream    → stream
    Experts       the same with a router and the experts it chooses            → stream

Every implementation of a model builds its layers from this list: `models/layer.py` as calls of a backend's region ops,
`ops/cpu/decoder.py` as arguments of the native decoder's layers. Weights are named as in `TensorSpec`, without the
ending `.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.spec import Gqa, LayerSpec, MixerSpec, MlpSpec, MoeSpec


@dataclass(frozen=True)
class Matrices:
    """Matrices with the same input, stacked by rows in this order."""

    names: tuple[str, ...]
    has_bias: bool = False


@dataclass(frozen=True)
class NormProject:
    norm: str
    projection: Matrices


@dataclass(frozen=True)
class Attend:
    """`layer`: whose cache the mixer reads and writes; weights of its own are named `<name>.<weight>`."""

    mixer: MixerSpec
    name: str
    layer: int


@dataclass(frozen=True)
class ProjectAdd:
    projection: Matrices
    post_norm: str | None = None  # applied to the product before it is added


@dataclass(frozen=True)
class GatedMlp:
    norm: str
    gate_up: Matrices
    down: Matrices
    spec: MlpSpec
    post_norm: str | None = None


@dataclass(frozen=True)
class Experts:
    """Matrices of all experts are one tensor for each of `gates`, `ups` and `downs`: [experts, rows, columns]."""

    norm: str
    router: Matrices
    gates: str
    ups: str
    downs: str
    shared: tuple[Matrices, Matrices] | None  # gate and up, down of the expert for every token
    shared_gate: str | None
    spec: MoeSpec
    post_norm: str | None = None


Feed = GatedMlp | Experts
Region = NormProject | Attend | ProjectAdd | Feed
LayerRegions = tuple[NormProject, Attend, ProjectAdd, Feed]


def layer_regions(spec: LayerSpec, number: int) -> LayerRegions:
    """The regions of layer `number`, in the order in which they are computed."""
    name, mixer = f"layers.{number}", spec.mixer
    if isinstance(mixer, Gqa):
        inputs, output = _stacked(name, ("q", "k", "v"), mixer.qkv_bias), _stacked(name, ("o",), mixer.out_bias)
    else:
        inputs, output = _stacked(name, ("conv_in",), mixer.bias), _stacked(name, ("conv_out",), mixer.bias)
    return (
        NormProject(f"{name}.attn_norm", inputs),
        Attend(mixer, name, number),
        ProjectAdd(output, f"{name}.attn_post_norm" if spec.post_norms else None),
        _feed(spec, name),
    )


def _feed(spec: LayerSpec, name: str) -> Feed:
    norm, post_norm = f"{name}.mlp_norm", f"{name}.mlp_post_norm" if spec.post_norms else None
    if isinstance(spec.mlp, MlpSpec):
        return GatedMlp(norm, *_gated(name, spec.mlp), spec.mlp, post_norm)
    moe = spec.mlp
    return Experts(
        norm,
        _stacked(name, ("router",)),
        gates=f"{name}.experts.gate",
        ups=f"{name}.experts.up",
        downs=f"{name}.experts.down",
        shared=None if moe.shared is None else _gated(f"{name}.shared", moe.shared),
        shared_gate=f"{name}.shared_gate" if moe.has_shared_gate else None,
        spec=moe,
        post_norm=post_norm,
    )


def _gated(name: str, spec: MlpSpec) -> tuple[Matrices, Matrices]:
    return _stacked(name, ("gate", "up"), spec.bias), _stacked(name, ("down",), spec.bias)


def _stacked(name: str, parts: tuple[str, ...], has_bias: bool = False) -> Matrices:
    return Matrices(tuple(f"{name}.{part}" for part in parts), has_bias)
