"""Settings of the engine. The docstring under a field is its help text on the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

LoadFormat = Literal["auto", "safetensors", "gguf", "dummy"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
KVDType = Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"]
BackendName = Literal["auto", "reference", "cpu", "triton"]
DeviceName = Literal["auto", "cpu", "cuda"]
Link = Literal["auto", "threads", "shared", "gloo", "ipc"]
ActivationBits = Literal["auto", "8", "mixed", "16"]

# Default maximum of sequences and tokens per step.
CPU_LIMITS, SMALL_GPU_LIMITS, GPU_LIMITS = (64, 512), (256, 2048), (1024, 8192)
LARGE_GPU_BYTES = 64 * 10**9
USUAL_BLOCK_SIZE = 16  # tokens
MAX_AUTO_CONTEXT = 32_768  # so that models with a context of a million tokens still start on a small machine


def gpu_limits(num_bytes: int) -> tuple[int, int]:
    """Return the default (max_running, token_budget) of a GPU with `num_bytes` of memory."""
    return GPU_LIMITS if num_bytes >= LARGE_GPU_BYTES else SMALL_GPU_LIMITS


@dataclass(frozen=True)
class ModelConfig:
    model: str = "smollm2:135m"
    """Short name from the catalog, path to a GGUF file or a model directory, or Hugging Face id."""
    served_name: str | None = None
    """Name that clients use for the model; by default the model's own name."""
    chat_template: str | None = None
    """File with a Jinja chat template to use instead of the model's own."""
    literal_content: bool = True
    """Tokenize control tokens written in the messages of a conversation (`<|im_start|>`) as plain text, so that no
    user's text can start a new turn. Prompts of completions may always contain control tokens."""
    load_format: LoadFormat = "auto"
    """Format of the weights. `dummy` creates random weights from the config alone, for benchmarks."""
    dtype: DType = "auto"
    """Data type of activations and unquantised weights. By default float32 on a CPU. By default on a GPU float16 for
    files stored in float16 and bfloat16 for others, except float32 for models under 600 M parameters that are not
    stored in bfloat16 (unless `--deterministic` or `--quantization` is set)."""
    max_context: int | None = None
    """Maximum tokens of prompt plus answer; by default the model's own limit, but at most 32768."""
    quantization: Literal["none", "int8", "fp8", "int4"] = "none"
    """Quantise unquantised weights at load time: int8 on any device, fp8 or int4 on a GPU, where fp8 means int8 for
    routed experts. Weights that are already quantised (docs/models.md lists the formats) are not affected; on a GPU
    they are dequantised for float32 and with `--deterministic`."""
    seed: int = 0
    """Seed of random weights (`--load-format dummy`)."""
    sampling_defaults: bool = True
    """Use the model's recommended sampling parameters (from its generation_config.json or the catalog) where a request
    sets none."""
    tool_format: str = "auto"
    """Format of the model's tool calls: `auto` detects it from the chat template, `none` disables tool calls, or the
    name of a format (docs/tools.md)."""
    adapter: tuple[str, ...] = ()
    """Adapter of the model (LoRA, rsLoRA, DoRA): NAME=PATH of a PEFT folder or a GGUF file, or the path alone; may be
    given several times. Clients select it by using NAME or MODEL:NAME as the model."""
    adapter_slots: int | None = None
    """Maximum number of adapters in use at the same time; requests for others wait for a slot. By default the number of
    `--adapter` flags, at most 8. Must be set to load adapters while the server runs."""
    max_adapter_rank: int | None = None
    """Maximum rank of adapters loaded later; by default that of the `--adapter` flags, or 64 without any."""
    packed_cache: bool = True
    """Cache large models' weights on disk in the layout of the native kernels, for quick starts."""


@dataclass(frozen=True)
class CacheConfig:
    block_size: int | None = None
    """Tokens per KV block; by default 16, or as many as the model compresses to one entry, if that is more (DeepSeek
    V4: 128)."""
    num_blocks: int | None = None
    """KV blocks in the pool; by default as many as --memory-fraction allows."""
    num_states: int | None = None
    """Slots for states of recurrent layers (gated DeltaNet, Mamba): two per running sequence, and one per 64 tokens of
    a cached prefix; by default as many as --memory-fraction allows."""
    memory_fraction: float | None = None
    """Share of the memory left after loading for the KV cache; by default 0.25 on a CPU, 0.9 on a GPU."""
    kv_dtype: KVDType = "auto"
    """Data type of cached keys and values. `int8` (on a GPU also `fp8`) takes one byte per value plus a scale per
    vector, about half the memory of the default."""
    prefix_caching: bool = True
    """Reuse the KV blocks of prompts with a common prefix."""
    kv_disk: str | None = None
    """Folder for computed KV blocks, so that prompts are not recomputed after eviction from the pool or a restart;
    several servers may share it. By default none, or a folder in $TOKENMILL_HOME with --kv-disk-gb."""
    kv_disk_gb: float | None = None
    """Maximum size of the --kv-disk folder in GB, by default 16; the least recently used blocks are deleted first."""
    kv_host_gb: float = 0.0
    """Pinned host memory for a GPU's computed KV blocks, in GB, in addition to the pool."""
    kv_transfer: Literal["stream", "nixl"] = "stream"
    """How KV blocks are transferred between engine processes: `stream` sends them over sockets and authenticated
    connections between machines; `nixl` reads them from the other process's memory over RDMA, NVLink, shared memory or
    TCP, if both have NIXL (`pip install "tokenmill[nixl]"`). `UCX_NET_DEVICES` selects NIXL's network devices, by
    default only loopback."""
    context_shift: bool = False
    """Let conversations continue past the context: whenever it is full, the first tokens are kept and the older half of
    the others is dropped. Requests can override this."""
    context_keep: int = 4
    """Number of first tokens kept when the context shifts."""

    @property
    def tokens_per_block(self) -> int:
        return USUAL_BLOCK_SIZE if self.block_size is None else self.block_size


@dataclass(frozen=True)
class SchedulerConfig:
    max_running: int | None = None
    """Maximum number of running sequences; by default 64 on a CPU, 256 on a GPU, 1024 on a GPU with 64 GB or more."""
    token_budget: int | None = None
    """Maximum tokens per step; longer prompts are prefilled in chunks of this size. By default 512 on a CPU, 2048 on a
    GPU, 8192 on a GPU with 64 GB or more."""
    max_waiting: int = 1024
    """Maximum number of waiting requests; further ones are refused."""
    slo: str | None = None
    """Latency targets, such as `ttft=1s,tpot=50ms`: steps are kept shorter than tpot, and a request whose predicted
    TTFT exceeds ttft is refused with 429 and the time to wait."""
    step_ms: float | None = None
    """Maximum milliseconds of a step that prefills prompts while answers are running, so that long prompts do not delay
    other streams; 0: no limit. By default the tpot of --slo, or 100 on a CPU and 50 on a GPU."""
    speculate: str = "auto"
    """Speculative decoding: propose draft tokens and verify several per step; answers do not change. `auto` finds draft
    tokens by n-gram lookup in the request's text and in recent answers, where that is expected to be faster; `ngram`
    uses all likely ones; `draft:MODEL` uses a smaller model with the same vocabulary; `mtp` uses the model's own
    multi-token prediction head, if it has one (DeepSeek V3, GLM-4.5, Qwen3.5 and their successors); `off` disables it.
    Always off on a GPU."""

    @property
    def num_rows(self) -> int:
        """Return `max_running`, or the default for a CPU while it is not resolved yet."""
        return CPU_LIMITS[0] if self.max_running is None else self.max_running

    @property
    def num_tokens(self) -> int:
        """Return `token_budget`, or the default for a CPU while it is not resolved yet."""
        return CPU_LIMITS[1] if self.token_budget is None else self.token_budget


@dataclass(frozen=True)
class OpsConfig:
    device: DeviceName = "auto"
    """Device that runs the model."""
    backend: BackendName = "auto"
    """Kernels that compute the model; `auto` selects the fastest that support it."""
    activation_bits: ActivationBits = "auto"
    """Precision of activations in native kernels that multiply quantised weights: 8 bits (fastest), 16 bits (no visible
    change), or mixed, with 16 bits only for blocks with outliers. By default mixed for models under 600 M parameters,
    whose answers change visibly with 8 bits, and 8 for larger ones."""
    deterministic: bool = False
    """On a GPU: make a request's tokens independent of the rest of the batch, at some cost in speed. On a CPU they
    always are."""
    threads: int | None = None
    """Number of CPU threads; by default the number of physical cores that the process may use."""
    fast_start: bool | None = None
    """Shorten start-up with techniques that depend on the versions of torch and Triton: parts of torch are imported in
    the background, and GPU kernels are compiled in forked processes. By default on for the command line and for engine
    processes, off for a model that a Python program opens in its own process."""


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = 1
    """Tensor parallel ranks, on GPUs or CPUs of this machine: every rank holds some rows of every matrix (`--threads`
    is per rank). Answers do not depend on the number of ranks, bit for bit with native kernels and with
    `deterministic`. On CPUs it pays if each rank has its own memory (a socket each); on one socket, threads are
    faster."""
    rank_gpus: str | None = None
    """GPU of each rank, by torch's device numbers, such as `0,1`; by default 0, 1, 2 and so on. `0,0` puts two ranks on
    one GPU, for tests; use CUDA MPS, otherwise each exchange takes milliseconds. Rank 0 must use GPU 0
    (CUDA_VISIBLE_DEVICES sets the order)."""
    pp: int = 1
    """Pipeline parallel stages, each with some of the layers and `tp` ranks, which compute different steps at the same
    time. Stages are balanced by cost; answers do not depend on their number."""
    lanes: int | None = None
    """Steps in flight in a pipeline, each with a share of the running requests; by default the number of stages, on
    GPUs one more. Only with `pp` above 1."""
    ep: bool = False
    """Expert parallel: each of the `tp` ranks holds some whole experts instead of some rows of all experts. This needs
    one exchange instead of two; answers do not change."""
    dp_attention: bool = False
    """Data parallel attention: each of the `tp` ranks stores the KV cache of some sequences and computes all heads for
    them, instead of some heads for all sequences. For models with few KV heads, or latent attention, whose cache would
    otherwise be replicated on every rank: `tp` times as many tokens fit. Answers do not change."""
    expert_loads: str | None = None
    """File with the measured number of tokens per expert (`benchmarks/experts.py`), by which experts are distributed so
    that ranks get about equally many tokens. Only with `ep`."""
    expert_copies: int = 0
    """Number of experts per layer, those with the most tokens, that are replicated on a second rank; the two copies
    take turns. Only with `expert_loads`."""
    stages_at: str | None = None
    """HOST:PORT to listen on for later pipeline stages on other machines (`tokenmill host --join tcp://HOST:PORT`, with
    the same TOKENMILL_RANK_KEY), instead of starting them on this machine. Each machine runs all `tp` ranks of its
    stage. Only with `pp`."""
    link: Link = "auto"
    """How ranks communicate: `shared` memory between processes; `gloo` over loopback (only with torch's ops); `ipc` on
    GPUs, where kernels access each other's memory; `threads` of one process, for tests."""

    @property
    def num_ranks(self) -> int:
        return self.tp * self.pp

    @property
    def num_lanes(self) -> int:
        return self.lanes or self.pp


@dataclass(frozen=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
