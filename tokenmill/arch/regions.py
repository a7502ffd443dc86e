"""The regions of a layer, as data: the steps computed on the residual stream, in order, and their weights.

    NormProject   normed stream × matrices with a common input                 → activations
    Attend        the mixer: attention or recurrence over the tokens           → activations
    ProjectAdd    activations × matrix (→ norm), added to the stream           → stream
                  again for a second mixer, if a layer has two
    GatedMlp      norm → down(act(gate) * up) (→ norm), added to the stream    → stream
    Experts       the same with a router and the experts it chooses            → stream
    SideBySide    both of the last two in parallel                             → stream
    AddInput      the layer's own embedding of the token, through a gate       → stream

Every implementation of a model builds its layers from this list: `models/layer.py` as calls of a backend's region ops,
`ops/cpu/decoder.py` as arguments of the native decoder's layers. Weights are named as in `TensorSpec`, without the
ending `.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import Activation, Gqa, LayerSpec, MixerSpec, Mla, MlpSpec, MoeSpec, ShortConv, WindowedMqa
from tokenmill.arch.tensors import XIELU


@dataclass(frozen=True)
class Matrices:
    """Names of matrices with the same input, stacked by rows in this order."""

    names: tuple[str, ...]
    has_bias: bool = False


@dataclass(frozen=True)
class NormProject:
    norm: str | None  # None: the stream is projected as it is
    projection: Matrices


@dataclass(frozen=True)
class Attend:
    """The mixer. `layer`: the layer whose cache it reads and writes; its own weights are named `<name>.<weight>`."""

    mixer: MixerSpec
    name: str
    layer: int


@dataclass(frozen=True)
class ProjectAdd:
    projection: Matrices
    post_norm: str | None = None  # applied to the product before it is added
    scale: float = 1.0  # multiplies what is added


@dataclass(frozen=True)
class GatedMlp:
    norm: str | None
    gate_up: Matrices  # up alone where there is no gate
    down: Matrices
    spec: MlpSpec
    post_norm: str | None = None
    scale: float = 1.0
    curve: tuple[str, ...] = ()  # the numbers of an activation that has learned ones


@dataclass(frozen=True)
class Experts:
    """Routed experts. `gates`, `ups` and `downs` each name one tensor [experts, rows, columns]."""

    norm: str | None
    router: Matrices
    gates: str | None
    ups: str
    downs: str
    shared: tuple[Matrices, Matrices] | None  # gate and up, and down, of the shared expert
    shared_gate: str | None
    latent: tuple[Matrices, Matrices] | None  # projections to the experts' input width and back
    router_norm: str | None
    choice_bias: str | None
    expert_scales: str | None
    table: str | None  # the experts of each token
    spec: MoeSpec
    post_norm: str | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class SideBySide:
    """An MLP and experts that read the same stream, each with its own norms; their results are added and normed."""

    mlp: GatedMlp
    experts: Experts
    post_norm: str | None
    scale: float = 1.0


@dataclass(frozen=True)
class AddInput:
    """The layer's own embedding of each token, times a gate computed from the stream, projected, normed and added."""

    gate: Matrices
    up: Matrices
    norm: str
    activation: Activation


Feed = GatedMlp | Experts | SideBySide
Region = NormProject | Attend | ProjectAdd | Feed | AddInput


@dataclass(frozen=True)
class LayerRegions:
    """A layer's regions in the order of computation; with `is_parallel`, `add` and `feed` read the same stream."""

    project: NormProject
    attend: Attend
    add: ProjectAdd
    feed: Feed | None
    is_parallel: bool = False
    add_input: AddInput | None = None
    scale: str | None = None  # weight that the stream is multiplied by at the end
    side: tuple[Attend, ProjectAdd] | None = None  # a second mixer, which reads the last projected activations


def layer_regions(spec: LayerSpec, number: int) -> LayerRegions:
    name = f"layers.{number}"
    inputs, attend, add = _mixer_regions(spec, spec.mixer, name, number)
    side = None
    if spec.side_mixer is not None:
        more, side_attend, side_add = _mixer_regions(spec, spec.side_mixer, name, number)
        inputs, side = Matrices((*inputs.names, *more.names), inputs.has_bias), (side_attend, side_add)
    return LayerRegions(
        NormProject(f"{name}.attn_norm" if spec.has_pre_norms else None, inputs),
        attend,
        add,
        _feed(spec, name),
        spec.is_parallel,
        _add_input(spec, name),
        f"{name}.scale" if spec.has_scale else None,
        side,
    )


def _mixer_regions(spec: LayerSpec, mixer: MixerSpec, name: str, number: int) -> tuple[Matrices, Attend, ProjectAdd]:
    """Return the projections that a mixer reads, the mixer, and the addition of its result."""
    cache = number
    match mixer:
        case Gqa():
            inputs, output = _stacked(name, _inputs(mixer), mixer.qkv_bias), _stacked(name, ("o",), mixer.out_bias)
            cache = number if mixer.shares_kv_of is None else mixer.shares_kv_of
        case Mla():
            index = () if mixer.indexer is None else ("index_k", "index_weights")
            gate = () if mixer.gate is None else ("attn_gate",)
            inputs = _stacked(name, ("q" if mixer.q_rank is None else "q_down", "kv_down", *index, *gate))
            output = _stacked(name, ("o",))
        case WindowedMqa():
            inputs = _stacked(name, tuple(part for part, _ in mixer.projected_parts))
            output = _stacked(name, ("o",))
        case ShortConv():
            inputs, output = _stacked(name, ("conv_in",), mixer.bias), _stacked(name, ("conv_out",), mixer.bias)
        case Recurrent():
            parts = tuple(f"ssm_{part}" for part, _ in mixer.projected_parts)
            inputs, output = _stacked(name, parts, mixer.bias), _stacked(name, ("ssm_out",), mixer.bias)
    add = ProjectAdd(output, f"{name}.attn_post_norm" if spec.has_post_norms else None, spec.residual_scale)
    return inputs, Attend(mixer, name, cache), add


def _inputs(mixer: Gqa) -> tuple[str, ...]:
    """Return the names of the input projections; values that equal keys use the key matrix a second time."""
    own = ("k", "k" if mixer.value_is_key else "v") if mixer.has_own_kv else ()
    gate = ("attn_gate",) if mixer.gate is not None else ()
    return ("q", *own, *gate, *(("index_q", "index_k") if mixer.block_indexer is not None else ()))


def _feed(spec: LayerSpec, name: str) -> Feed | None:
    if spec.mlp is None:
        return None
    norm = f"{name}.attn_norm" if spec.is_parallel and not spec.has_parallel_norm else f"{name}.mlp_norm"
    norm_before = norm if spec.has_pre_norms else None
    post_norm, scale = f"{name}.mlp_post_norm" if spec.has_mlp_post_norm else None, spec.residual_scale
    side = spec.side_experts
    if side is not None and isinstance(spec.mlp, MlpSpec):
        mlp = GatedMlp(norm_before, *_mlp(name, spec.mlp), spec.mlp, f"{name}.side.mlp_post_norm")
        experts = _experts(side, f"{name}.side", f"{name}.side.norm", f"{name}.side.post_norm")
        return SideBySide(mlp, experts, post_norm, scale)
    if isinstance(spec.mlp, MlpSpec):
        curve = tuple(f"{name}.{number}" for number in XIELU) if spec.mlp.activation == "xielu" else ()
        return GatedMlp(norm_before, *_mlp(name, spec.mlp), spec.mlp, post_norm, scale, curve)
    return _experts(spec.mlp, name, norm_before, post_norm, scale)


def _experts(moe: MoeSpec, name: str, norm: str | None, post_norm: str | None, scale: float = 1.0) -> Experts:
    routing = moe.routing
    return Experts(
        norm,
        _stacked(name, ("router",), routing.has_router_bias),
        gates=f"{name}.experts.gate" if moe.expert.is_gated else None,
        ups=f"{name}.experts.up",
        downs=f"{name}.experts.down",
        shared=None if moe.shared is None else _mlp(f"{name}.shared", moe.shared),
        shared_gate=f"{name}.shared_gate" if moe.has_shared_gate else None,
        latent=None if moe.latent_size is None else (_stacked(name, ("latent_in",)), _stacked(name, ("latent_out",))),
        router_norm=f"{name}.router_norm" if routing.has_input_norm else None,
        choice_bias=f"{name}.choice_bias" if routing.has_choice_bias else None,
        expert_scales=f"{name}.expert_scales" if routing.has_expert_scales else None,
        table=f"{name}.expert_table" if routing.table_rows else None,
        spec=moe,
        post_norm=post_norm,
        scale=scale,
    )


def _add_input(spec: LayerSpec, name: str) -> AddInput | None:
    mlp = spec.mlp.expert if isinstance(spec.mlp, MoeSpec) else spec.mlp
    if not spec.input_width or mlp is None:
        return None
    activation = mlp.activation
    gate, up = _stacked(name, ("input_gate",)), _stacked(name, ("input_up",))
    return AddInput(gate, up, f"{name}.input_norm", activation)


def _mlp(name: str, spec: MlpSpec) -> tuple[Matrices, Matrices]:
    parts = ("gate", "up") if spec.is_gated else ("up",)
    return _stacked(name, parts, spec.bias), _stacked(name, ("down",), spec.bias)


def _stacked(name: str, parts: tuple[str, ...], has_bias: bool = False) -> Matrices:
    return Matrices(tuple(f"{name}.{part}" for part in parts), has_bias)
