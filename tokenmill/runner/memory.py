"""The memory that a runner uses besides the weights, and how many KV blocks fit into the rest.

Pure arithmetic without torch: the planner's estimate and the engine's allocation both use these functions.

    GPU memory   [ runtime | weights | rows | largest step | graphs | KV pool ................ | kept free ]

    rows            tables of the permanent rows: block ids, sampling parameters, token counts, rotary angles
    largest step    the peak of a step of `token_budget` tokens, or its logits; reserved at start
    graphs          the same for a decoding step of `max_running` rows, or for a captured step of prompt chunks and
                    decoding rows, in a separate pool
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, prod

from tokenmill.arch.cache_parts import CHUNK
from tokenmill.arch.cost import WeightParts
from tokenmill.arch.indexer import Indexer
from tokenmill.arch.packed_formats import (
    EXPANDED_BYTES,
    INT4_GROUP,
    INT8_GROUP,
    UNQUANTIZED,
    StoredFormat,
    packed_int_format,
)
from tokenmill.arch.recurrent import Recurrent
from tokenmill.arch.spec import FeedSpec, Gqa, MixerSpec, Mla, ModelSpec, MoeSpec, ShortConv, TensorSpec, WindowedMqa
from tokenmill.arch.tensors import tensors_of
from tokenmill.errors import InvalidConfig
from tokenmill.kv.layout import KVLayout
from tokenmill.params import DEVICE_PARAM_SLOTS
from tokenmill.runner.mixed_sizes import MAX_PROMPTS, can_mix, largest_mixed_step, mixed_sizes, singles_for

LIVE_HIDDEN = 5  # hidden states: residual and addend of this layer and of the previous one, and the norm of their sum
LIVE_STREAMS = 3  # the same of models with several residual streams: before a layer, predicted, and corrected
LOGIT_BYTES = 6  # per logit: as computed, and as float32
HOST_DRAW_BYTES = 40  # per logit of a row sampled on the host: copies, fixed-point probabilities, sums
SCORE_BYTES = 16  # per logit that scores a prompt token: as computed, as float32, and slices of both
MAX_HOST_LOGITS = 1 << 24  # logits sampled on the host, or scored, at a time
GRAPH_BYTES = 3 << 20  # that the driver keeps for one captured step
NUM_GRAPH_KINDS = 3  # each size is captured for each kind of sampling
WORKSPACE_BYTES = 64 << 20  # of the GEMM libraries, one for steps and one for graphs
GPU_START_BYTES = 256 << 20  # kernels that are loaded when they are first launched
GPU_SPLIT_TOKENS = 320  # max of tokens times splits of their context, in steps of few tokens
GPU_INDEX_SCORES = 1 << 24  # float32 scores that an indexer keeps at a time (`ops/triton/attention/sparse.py`)
CPU_INDEX_SCORES = 1 << 22  # the same for the native CPU kernels (`csrc/decoder/indexer.cpp`)
SPLIT_QUERIES = 68_000  # partial results of a chunk's context splits: 64 for each of four programs at a time
MAX_ROW_EDITS, EDIT_BYTES = 512, 12  # edits of single logits that a row keeps on the device: id, value, end


# ── GPU memory besides the KV pool ─────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class RunnerLimits:
    """The limits of a step: see the config fields of the same names."""

    max_running: int
    token_budget: int
    max_context: int
    block_size: int = 16
    value_bytes: int = 2  # of an activation
    expands_weights: bool = False  # steps of many tokens expand quantised matrices, a piece at a time


@dataclass(frozen=True)
class RunnerBytes:
    """The memory of a runner in bytes, by use: see the drawing above."""

    rows: int
    step: int
    graphs: int

    @property
    def total(self) -> int:
        return self.rows + self.step + self.graphs


NO_RUNNER_BYTES = RunnerBytes(0, 0, 0)


def runner_bytes(spec: ModelSpec, limits: RunnerLimits, *, share: float = 1.0) -> RunnerBytes:
    """Return the bytes of a GPU runner; `share`: of each matrix and the vocabulary on one of several devices."""
    logits = min(limits.max_running, limits.token_budget) * spec.vocab_size * share
    host = min(logits, MAX_HOST_LOGITS) * HOST_DRAW_BYTES
    scored = min(limits.token_budget * spec.vocab_size * share, MAX_HOST_LOGITS) * SCORE_BYTES
    scored += 2 * limits.token_budget * spec.hidden_size * limits.value_bytes  # states of all tokens, and their norms
    step = max(_widest(spec, limits.token_budget, limits, share), logits * LOGIT_BYTES + host, scored)
    step += limits.token_budget * spec.hidden_size * limits.value_bytes  # states of a step that is not collected yet
    step += index_bytes(spec, limits.token_budget, limits.max_context, GPU_INDEX_SCORES) + _split_bytes(spec)
    graphs = max(_widest(spec, limits.max_running, limits, share), logits * LOGIT_BYTES)
    graphs += index_bytes(spec, limits.max_running, limits.max_context, GPU_INDEX_SCORES)
    graphs += _window_split_bytes(spec)
    if share == 1.0 and can_mix(spec):
        graphs = max(graphs, mixed_step_bytes(spec, limits)) + _mixed_graph_bytes(spec, limits)
    graphs += len(graph_sizes(limits.max_running)) * NUM_GRAPH_KINDS * GRAPH_BYTES + _table_bytes(spec, limits)
    workspace = WORKSPACE_BYTES + (_expanded_bytes(spec, limits) if limits.expands_weights else 0)
    return RunnerBytes(_row_bytes(spec, limits), int(step) + workspace, int(graphs) + workspace)


def mixed_step_bytes(spec: ModelSpec, limits: RunnerLimits) -> int:
    """Return the bytes of the largest captured step of chunks and decoding rows, with its rows' block tables."""
    tables = len(KVLayout.from_spec(spec).groups) * table_width(ceil(limits.max_context / limits.block_size)) * 4
    rows = singles_for(limits.max_running)[-1] + MAX_PROMPTS
    widest = _widest(spec, largest_mixed_step(limits.max_running), limits, 1.0)
    return int(widest) + _split_bytes(spec) + rows * tables


def _mixed_graph_bytes(spec: ModelSpec, limits: RunnerLimits) -> int:
    """Return the bytes that captured steps of chunks and decoding rows keep: the driver's, and hidden states."""
    sizes = mixed_sizes(limits.max_running)
    rows = sum(singles + MAX_PROMPTS for singles, _ in sizes)
    return len(sizes) * GRAPH_BYTES + rows * spec.hidden_size * limits.value_bytes


def _split_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the partial results of a chunk's context splits, which are merged afterwards."""
    widest = max(
        (mixer.head_dim for layer in spec.layers for mixer in layer.mixers if isinstance(mixer, Gqa)), default=0
    )
    return SPLIT_QUERIES * (widest + 1) * 4 if widest else 0


def index_bytes(spec: ModelSpec, num_tokens: int, max_context: int, max_scores: int) -> int:
    """Return the bytes that indexers of sparse attention use in a step: scores of entries, for some tokens at a time,
    and the entries selected for each token. Contexts short enough to select every entry are not scored."""
    largest = 0
    for indexer, rate in indexers(spec):
        entries = max_context // rate
        if entries > indexer.top_k:
            scores = min(num_tokens * entries, max(max_scores, entries))
            largest = max(largest, 4 * (scores + num_tokens * indexer.top_k))
    return largest


def _window_split_bytes(spec: ModelSpec) -> int:
    """Return the bytes of float32 partial results where programs split attention over compressed entries."""
    mixers = (layer.mixer for layer in spec.layers)
    return max((4 * mixer.q_size * GPU_SPLIT_TOKENS for mixer in mixers if isinstance(mixer, WindowedMqa)), default=0)


def indexers(spec: ModelSpec) -> list[tuple[Indexer, int]]:
    """Return the distinct indexers of a model, each with the number of tokens that one entry stands for."""
    found: dict[tuple[Indexer, int], None] = {}
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, Mla) and mixer.indexer is not None:
            found[mixer.indexer, 1] = None
        if isinstance(mixer, WindowedMqa) and mixer.compression is not None and mixer.compression.indexer is not None:
            found[mixer.compression.indexer, mixer.compression.rate] = None
    return list(found)


def _expanded_bytes(spec: ModelSpec, limits: RunnerLimits) -> int:
    largest = max(prod(tensor.shape) for tensor in tensors_of(spec).values() if tensor.kind == "linear")
    return min(EXPANDED_BYTES, 2 * largest * limits.value_bytes)  # gate and up are one matrix


def _widest(spec: ModelSpec, num_tokens: int, limits: RunnerLimits, share: float) -> float:
    """Return the peak bytes of activations within a layer."""
    widest = max(_layer_width(spec, index) for index in range(spec.num_layers)) * share
    streams = 0 if spec.streams is None else LIVE_STREAMS * spec.streams.num_streams
    return num_tokens * ((LIVE_HIDDEN + streams) * spec.hidden_size + widest) * limits.value_bytes


def _layer_width(spec: ModelSpec, index: int) -> int:
    """Return the peak number of values of one token within a layer."""
    layer = spec.layers[index]
    fed = _feed_width(layer.mlp, spec.hidden_size)
    if layer.side_experts is not None:
        fed += _feed_width(layer.side_experts, spec.hidden_size) + 2 * spec.hidden_size
    mixer = sum(map(_mixer_width, layer.mixers))
    return (mixer + fed if layer.is_parallel else max(mixer, fed)) + spec.num_layers * layer.input_width * 3


def _feed_width(feed: FeedSpec | None, hidden: int) -> int:
    if feed is None:
        return 0
    if not isinstance(feed, MoeSpec):
        return 3 * feed.intermediate_size
    shared = 0
    if feed.shared is not None:
        count = feed.shared.intermediate_size // feed.expert.intermediate_size if feed.is_shared_like_experts else 1
        shared = 3 * feed.shared.intermediate_size + count * hidden
    return feed.num_active * (3 * feed.expert.intermediate_size + hidden) + shared + 2 * (feed.latent_size or 0)


def _mixer_width(mixer: MixerSpec) -> int:
    if isinstance(mixer, ShortConv):
        return 5 * mixer.width  # b, c and x as one, the convolution's inputs and its output
    if isinstance(mixer, Mla):  # projections, queries and their latents, absorbed ones, mixtures, the output
        absorbed = mixer.num_heads * (mixer.entry_size + mixer.kv_rank)
        index = 0 if mixer.indexer is None else mixer.indexer.q_size + 2 * mixer.indexer.projected_size
        gated = 0 if mixer.gate is None else mixer.out_size + 2 * mixer.gate_size
        return 2 * mixer.q_size + 2 * (mixer.q_rank or 0) + mixer.entry_size + absorbed + mixer.out_size + index + gated
    if isinstance(mixer, WindowedMqa):  # projections, queries twice, mixtures, what groups of heads are projected to
        return sum(size for _, size in mixer.projected_parts) + 4 * mixer.q_size + mixer.out_size
    if isinstance(mixer, Recurrent):
        # the projections as one; q, k and v, with two matrices of a chunk or in float32; o in float32, the output
        heads = mixer.value_heads
        if mixer.inner is not None:  # projections, convolved values, their inner projections, steps, o, the output
            return 2 * mixer.projected_size + 6 * mixer.values_size + 2 * (mixer.inner.rank + 2 * mixer.key_dim)
        chunks, tokens = mixer.conv_size + 2 * CHUNK * heads, 3 * (mixer.keys_size + mixer.values_size)
        return mixer.projected_size + max(chunks, tokens) + 3 * mixer.values_size + 4 * mixer.num_decays + 2 * heads
    # q, k, v as one, queries, the output; long prompts have their keys and values gathered and a second output
    plain = 2 * (mixer.q_size + mixer.out_size) + 2 * (mixer.kv_size + mixer.v_size) + mixer.gate_size
    if mixer.block_indexer is not None:
        plain += 2 * mixer.block_indexer.projected_size
    return plain if mixer.is_plain else plain + 2 * mixer.q_size + 2 * mixer.out_size + 2 * mixer.kv_size


def _row_bytes(spec: ModelSpec, limits: RunnerLimits) -> int:
    draws = 8 * DEVICE_PARAM_SLOTS + 2 * spec.vocab_size + 4 + EDIT_BYTES * MAX_ROW_EDITS
    angles = sum(limits.max_context * rope.rotary_dim * 4 for rope in spec.ropes)
    return limits.max_running * draws + _table_bytes(spec, limits) + angles


def _table_bytes(spec: ModelSpec, limits: RunnerLimits) -> int:
    num_groups = len(KVLayout.from_spec(spec).groups)
    return num_groups * limits.max_running * table_width(ceil(limits.max_context / limits.block_size)) * 4


def table_width(max_blocks: int) -> int:
    """Return the number of block ids in a row's table: a multiple of 4, so that each group's tables start at a multiple
    of 16 bytes for any number of rows, and one kernel can read them all."""
    return ceil(max_blocks / 4) * 4


Formats = Mapping[str, StoredFormat]
NOTHING_STORED: Formats = {}


def gpu_weight_parts(
    spec: ModelSpec, value_bytes: int, quantization: str = "none", stored: Formats = NOTHING_STORED
) -> WeightParts:
    """Return the bytes of weights as the Triton kernels hold them: vectors in float32, matrices in the file's quantised
    format (`stored`), in the compute type, or quantised while they load."""
    kept = {
        name: kept_bytes(tensor, value_bytes, quantization, stored.get(name))
        for name, tensor in tensors_of(spec).items()
    }
    embedding = kept["embed.weight"]
    experts = sum(num_bytes for name, num_bytes in kept.items() if ".experts." in name)
    tables = kept.get("layer_inputs.embed.weight", 0)
    return WeightParts(embedding, experts, sum(kept.values()) - embedding - experts - tables, tables)


def kept_bytes(tensor: TensorSpec, value_bytes: int, quantization: str, stored: StoredFormat | None) -> int:
    size = prod(tensor.shape)
    if tensor.kind == "vector":
        return 4 * size if not tensor.name.endswith(".bias") else value_bytes * size
    form = packed_int_format(tensor.name, tensor.shape, stored)
    if form is not None:
        return form.num_bytes(tensor.shape)
    columns, is_of_experts = tensor.shape[-1], len(tensor.shape) == 3
    is_whole = tensor.kind != "linear" or tensor.name.endswith(UNQUANTIZED)
    if quantization == "none" or is_whole or columns % INT4_GROUP:
        return value_bytes * size
    if quantization == "fp8" and not is_of_experts:
        return size + 4 * tensor.shape[0]
    if quantization in ("fp8", "int8"):  # there are no fp8 kernels for experts
        return size + size // INT8_GROUP * 2
    copies = 1 if columns % (2 * INT4_GROUP) or is_of_experts else 2  # of scales: see `PackedIntFormat.num_bytes`
    return size // 2 + size // INT4_GROUP * value_bytes * copies


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes that decoding steps are padded to.

    1 2 4 8 16 24 32 48 64 80 ... 128 160 ... 256 320 384 512 640 ...
    448 and the larger odd multiples of 64 are left out: cuBLAS takes longer for them than for the next size
    (`docs/experiments/gpu-gemm.md`).
    """
    sizes = [1, 2, 4, 8, 16, 24, *range(32, 128, 16), *range(128, 256, 32), 256, 320, 384, *range(512, max_rows, 128)]
    return [size for size in sizes if size < max_rows] + [max_rows]


# ── the KV pool ────────────────────────────────────────────────────────────────────────────────────────


def blocks_for_context(layout: KVLayout, context: int, block_size: int, max_chunk: int = 1) -> int:
    """Return the maximum number of blocks of a sequence of `context` tokens, summed over all paged groups."""
    rules = layout.rules(block_size)
    return sum(rule.max_held(context, max_chunk) for rule in rules if rule.kind == "paged")


def num_blocks_that_fit(
    layout: KVLayout,
    *,
    free_bytes: int,
    memory_fraction: float,
    block_size: int,
    block_bytes: int,
    max_context: int,
    max_rows: int,
    max_chunk: int,
) -> int:
    """Return how many blocks fit into `memory_fraction` of the free memory, but no more than `max_rows` full contexts
    can use. If the model has recurrent layers, only half of that memory is for blocks.

    The first block is the null block, to which tables point for positions that a window has passed.
    """
    affordable = int(free_bytes * memory_fraction * (0.5 if layout.is_recurrent else 1.0)) // block_bytes
    useful = max_rows * blocks_for_context(layout, max_context, block_size, max_chunk) + 1
    num_blocks = min(affordable, useful)
    if num_blocks < 1 + len(layout.paged):
        raise InvalidConfig(
            f"no room for a KV cache: {free_bytes / 2**20:.0f} MiB are free after the weights",
            param="memory_fraction",
            hint="use a smaller model or more quantised weights",
        )
    return num_blocks


# ── states of recurrent layers ─────────────────────────────────────────────────────────────────────────


def recurrent_bytes(layout: KVLayout, num_states: int, block_size: int, max_rows: int, share: float = 1.0) -> int:
    """Return the bytes of the pools of states and cells; `share`: of them on one of several devices."""
    num_cells = cells_for_states(layout, num_states, block_size, max_rows)
    return ceil((num_states * layout.state_bytes + num_cells * layout.cells_bytes(block_size)) * share)


def cells_for_states(layout: KVLayout, num_states: int, block_size: int, max_rows: int) -> int:
    """Return the number of cell blocks for `num_states` states, null blocks included: a chunk and a block for each
    sequence with two states (the one it reads and the one it will write), and room for one long prompt."""
    if not layout.is_recurrent:
        return 0
    per_chunk = CHUNK // block_size
    return 1 + 2 * per_chunk + min(max_rows, (num_states - 1) // 2) * (per_chunk + 1)


def num_states_that_fit(
    layout: KVLayout, *, free_bytes: int, block_size: int, num_blocks: int, max_rows: int, share: float = 1.0
) -> int:
    """Return how many recurrent states fit into the memory left by the blocks, but no more than are useful: two for
    each row and one for every chunk of tokens in the pool of blocks. The first one is the null block. Return 0 if the
    model has no recurrent layers."""
    if not layout.is_recurrent:
        return 0
    max_states = 1 + 2 * max_rows + num_blocks * block_size // CHUNK
    candidates = range(1 + 2, max_states + 1)
    fitting = bisect_right(
        candidates, free_bytes, key=lambda number: recurrent_bytes(layout, number, block_size, max_rows, share)
    )
    if not fitting:
        raise InvalidConfig(
            f"no room for the states of recurrent layers: two of them take {2 * layout.state_bytes / 2**20:.0f} MiB",
            param="memory_fraction",
            hint="use a smaller model, more quantised weights or fewer KV blocks",
        )
    return candidates[fitting - 1]
