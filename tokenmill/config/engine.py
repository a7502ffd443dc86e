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

# Default sequences and tokens of a step.
CPU_LIMITS, SMALL_GPU_LIMITS, GPU_LIMITS = (64, 512), (256, 2048), (1024, 8192)
LARGE_GPU_BYTES = 64 * 10**9
MAX_AUTO_CONTEXT = 32_768  # models that promise a million tokens still start on a small machine


def gpu_limits(num_bytes: int) -> tuple[int, int]:
    """Default (max_running, token_budget) on a GPU with so much memory."""
    return GPU_LIMITS if num_bytes >= LARGE_GPU_BYTES else SMALL_GPU_LIMITS


@dataclass(frozen=True)
class ModelConfig:
    model: str = "smollm2:135m"
    """Short name from the catalog, path to a GGUF file or a model directory, or Hugging Face id."""
    served_name: str | None = None
    """Name that clients use; the model's own by default."""
    chat_template: str | None = None
    """File with a Jinja chat template to use instead of the model's own."""
    literal_content: bool = True
    """Read what spells a control token of the model (`<|im_start|>`) in a message of a conversation as the characters
    it is made of, so that no text of a user can open a turn. Prompts of completions are always read as they are."""
    load_format: LoadFormat = "auto"
    """`dummy` makes random weights from the config alone, for benchmarks."""
    dtype: DType = "auto"
    """What activations (and unquantised weights) are computed in. By default float32 on a CPU; on a GPU 16 bits,
    float16 where a file is stored in it, bfloat16 otherwise, but float32 for models under 600 M parameters that are not
    stored in bfloat16 (with `--deterministic` or `--quantization` 16 bits for them too)."""
    max_context: int | None = None
    """Longest prompt plus answer in tokens; by default the model's own limit, or 32768 where that is more."""
    quantization: Literal["none", "int8", "fp8", "int4"] = "none"
    """Quantise unquantised weights while loading: int8 anywhere, fp8 or int4 on a GPU, where fp8 means int8 for
    routed experts. What a file has quantised already (docs/models.md lists the formats) is computed with as it is,
    whatever this says; but on a GPU it is expanded for float32 and with `--deterministic`."""
    seed: int = 0
    """Seed of random weights (`--load-format dummy`)."""
    sampling_defaults: bool = True
    """Draw answers by the model's own settings (its generation_config.json, or the catalog's) where a request says
    nothing."""
    tool_format: str = "auto"
    """How the model writes tool calls: `auto` finds out from its chat template; `none`: it shall call none; or the name
    of a format (docs/tools.md)."""
    adapter: tuple[str, ...] = ()
    """An adapter of the model (LoRA, rsLoRA, DoRA): NAME=PATH of a PEFT folder or a GGUF file, or the path alone; may
    be given several times. Each answers as a model of its name, also as MODEL:NAME."""
    adapter_slots: int | None = None
    """Adapters that can be used at the same time; others wait for a slot. By default as many as are named, at most 8;
    give it to load adapters while the server runs."""
    max_adapter_rank: int | None = None
    """Largest rank of an adapter that is loaded later; by default that of the named ones, 64 without any."""
    packed_cache: bool = True
    """Keep large models' weights on disk in the order that native kernels read them in, for quick starts."""


@dataclass(frozen=True)
class CacheConfig:
    block_size: int = 16
    """Tokens in one KV block."""
    num_blocks: int | None = None
    """Blocks in the pool; by default as many as --memory-fraction allows."""
    num_states: int | None = None
    """States that recurrent layers (gated DeltaNet, Mamba-2) can keep, one for every 64 tokens of a sequence that shall
    be found again and two for each that runs; by default as many as --memory-fraction allows."""
    memory_fraction: float | None = None
    """Share of the memory left after loading that the KV cache may take; by default 0.25 on a CPU, 0.9 on a GPU."""
    kv_dtype: KVDType = "auto"
    """Precision of cached keys and values. `int8` (on a GPU also `fp8`) takes one byte a number and a scale for each
    vector: about half the memory of the default."""
    prefix_caching: bool = True
    """Reuse the KV blocks of prompts that begin alike."""
    kv_disk: str | None = None
    """Folder in which computed KV blocks are kept, so that prompts are found again after they had to leave the pool,
    and after a restart; several servers may share it. By default none, or one in $TOKENMILL_HOME with --kv-disk-gb."""
    kv_disk_gb: float | None = None
    """Gigabytes that the folder of --kv-disk may take, 16 by default; blocks not used for longest go first."""
    kv_host_gb: float = 0.0
    """Gigabytes of pinned host memory in which a GPU's computed KV blocks are kept beside the pool."""
    kv_transfer: Literal["stream", "nixl"] = "stream"
    """How KV blocks come from another engine process: over sockets and the authenticated links between machines, or
    read from its memory by NIXL (`pip install "tokenmill[nixl]"`), where both processes have it: over RDMA, NVLink,
    shared memory or TCP. `UCX_NET_DEVICES` names its network devices, by default the loopback alone."""
    context_shift: bool = False
    """Let conversations go on past the context: the first tokens stay, the older half of the others is forgotten each
    time the context is full. Requests can ask for it, or against it, themselves."""
    context_keep: int = 4
    """How many of the first tokens stay when the context shifts."""


@dataclass(frozen=True)
class SchedulerConfig:
    max_running: int | None = None
    """Sequences computed together at most; by default 64 on a CPU, 256 on a GPU, 1024 on one with 64 GB or more."""
    token_budget: int | None = None
    """Tokens computed in one step at most; long prompts are cut into chunks of this size. By default 512 on a CPU, 2048
    on a GPU, 8192 on one with 64 GB or more."""
    max_waiting: int = 1024
    """Requests that may wait; further ones are refused."""
    slo: str | None = None
    """Promise to clients, such as `ttft=1s,tpot=50ms`: a step takes no longer than tpot, and a request whose first
    token would come later than ttft is refused with 429 and the time to wait."""
    step_ms: float | None = None
    """Milliseconds that a step may take which computes prompts beside running answers, so that a long prompt does not
    hold up other streams; 0: as long as its tokens need. By default the tpot of --slo, or 100 on a CPU and 50 on a
    GPU."""
    speculate: str = "auto"
    """Speculative decoding: propose draft tokens and verify several in one step; answers stay the same. `auto` takes
    draft tokens from the request's own text and from recent answers, as many as pay off; `ngram` all likely ones;
    `draft:MODEL` those of a smaller model with the same vocabulary; `mtp` those of the model's own head that predicts
    further tokens, where it has one (DeepSeek V3, GLM-4.5, Qwen3.5 and their successors); `off` none. Always off on a
    GPU."""

    @property
    def num_rows(self) -> int:
        """`max_running`, or a CPU's default while the device is not chosen yet."""
        return CPU_LIMITS[0] if self.max_running is None else self.max_running

    @property
    def num_tokens(self) -> int:
        """`token_budget`, likewise."""
        return CPU_LIMITS[1] if self.token_budget is None else self.token_budget


@dataclass(frozen=True)
class OpsConfig:
    device: DeviceName = "auto"
    """Where the model runs."""
    backend: BackendName = "auto"
    """Which kernels compute the model; `auto` takes the fastest that can."""
    activation_bits: ActivationBits = "auto"
    """How finely native kernels round what they multiply quantised weights with: 8 bits (fastest), 16 (nothing of an
    answer changes), or mixed, 16 only for blocks with numbers much larger than the rest of their row. By default mixed
    for models under 600 M parameters, whose answers change visibly with 8, and 8 for the others."""
    deterministic: bool = False
    """On a GPU: the same tokens for a request whatever else is in the batch, at some cost in speed. On a CPU this
    always holds."""
    threads: int | None = None
    """CPU threads; the physical cores this process may use by default."""
    fast_start: bool | None = None
    """Shorten starts by means that depend on versions of torch and Triton: torch is imported in parts and beside other
    work, GPU kernels are compiled by copies of the process. By default on for the command line and an engine in a
    process of its own, off for a model that a Python program opens in its own process."""


@dataclass(frozen=True)
class ParallelConfig:
    tp: int = 1
    """Tensor parallel: ranks that compute every step together, each with some rows of every matrix, on GPUs or CPUs of
    this machine (`--threads` are those of a rank). Answers are the same with any number, bit for bit with native
    kernels and with `deterministic`. On CPUs it pays where each rank has memory of its own (sockets); on one socket,
    threads are faster."""
    rank_gpus: str | None = None
    """The GPU of each rank, by the numbers that torch has for them, such as `0,1`; by default 0, 1, 2 and so on. `0,0`
    puts two ranks on one GPU, which is for tests: under CUDA MPS, or each exchange takes milliseconds. Rank 0's is 0
    (CUDA_VISIBLE_DEVICES orders them)."""
    pp: int = 1
    """Pipeline parallel: stages of layers, each on `tp` ranks, that compute several steps at the same time, one behind
    the other. Layers are parted by cost; answers are the same with any number of stages."""
    lanes: int | None = None
    """Steps that a pipeline has in flight, each with its share of the running requests; the number of stages by
    default, on GPUs one more. Only for `pp` above 1."""
    ep: bool = False
    """Expert parallel: of the experts of a layer each of the `tp` ranks has some as a whole, instead of some rows of
    all. Results travel once instead of twice; answers are the same."""
    dp_attention: bool = False
    """Data parallel attention: each of the `tp` ranks keeps the contexts of some sequences and attends for these with
    all heads, instead of for all with some heads. For models whose few key heads, or latents, each rank would keep
    otherwise: there is room for `tp` times as many tokens. Answers are the same."""
    expert_loads: str | None = None
    """Tokens that each expert has been seen to get, a file of `benchmarks/experts.py`: experts are placed so that ranks
    get about as many. Only with `ep`."""
    expert_copies: int = 0
    """Number of experts of a layer, those with most tokens, that are on one more rank; the two take turns. Only with
    `expert_loads`."""
    stages_at: str | None = None
    """HOST:PORT at which the later stages of a pipeline join from other machines (`tokenmill host --join
    tcp://HOST:PORT`, TOKENMILL_RANK_KEY the same on all), a machine each with all `tp` ranks of its stage, instead of
    being started here. Only for `pp`."""
    link: Link = "auto"
    """How ranks reach each other. In a process each: by `shared` memory, or with torch's ops also by `gloo` over this
    machine's loopback; on GPUs by `ipc`, where kernels reach each other's memory; `threads`: in one process, for
    tests."""

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
