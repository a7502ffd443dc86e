"""Settings of the server. The docstring under a field is its help text on the command line.

Everything a client sends is bounded here. `api_key` is kept out of the repr, so that no log can show it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tokenmill.errors import InvalidConfig


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on; beyond this machine only with an API key or --allow-open."""
    port: tuple[int, ...] = (8000,)
    """Port to listen on; 0 takes a free one. May be given several times: 11434 beside 8000 for Ollama's clients."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Key that clients must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`; may be given several times."""
    api_key_file: Path | None = None
    """File with one API key a line; empty lines and lines that begin with # are skipped."""
    keys_file: Path | None = None
    """TOML file with API keys as records (`tokenmill keys`): digests, expiry, models; read again on SIGHUP. By default
    keys.toml in TOKENMILL_HOME, if it is there."""
    tls_cert: Path | None = None
    """File with the server's certificate and those that lead to its root (PEM), for https; read again on SIGHUP."""
    tls_key: Path | None = None
    """File with the certificate's private key (PEM)."""
    allow_open: bool = False
    """Listen beyond this machine without any API key."""
    public_metrics: bool = False
    """Answer /metrics without an API key."""
    cors_origin: tuple[str, ...] = ()
    """Origin whose web pages may call this server; `*` for all; may be given several times."""
    any_model_name: bool = False
    """Answer whatever model name a client asks for, or none, with the first model."""
    alias: tuple[str, ...] = ()
    """Another name for the first model, perhaps with wildcards (`claude-sonnet-*`); may be given several times. Other
    models have theirs in the settings file."""
    model_keep_alive: str | None = None
    """How long a model that no request uses stays in memory, such as `10m`; 0: not at all; -1: until room is needed,
    which is the default. The only model of a server stays for ever unless this is given."""
    max_loaded_models: int | None = None
    """Models in memory at the same time; by default as many as fit."""
    model_memory_gb: float | None = None
    """Memory for all models together, in GB; by default what is free at the start (of a GPU, all it has)."""
    replicas: int = 1
    """Engine processes of each model that the server is started with; requests go where their beginning is cached and
    little waits. On CPUs they share threads and memory; on GPUs each has a device of its own."""
    roles: str | None = None
    """What each replica is for, with commas between: `prefill` computes prompts, `decode` answers whose long prompts
    come computed from those, so that no prompt holds up its streams, `any` both, which is the default."""
    manage_models: bool | None = None
    """Let clients load and unload models, and pull, create, copy, delete and upload them (Ollama's /api routes for
    that); by default only where the server listens on this machine alone, and of several keys those that see all."""
    share_cache: bool = False
    """Let requests with different API keys share cached prompts. A client can then find out, from the number of cached
    tokens and from the time of an answer, what others have sent."""
    min_priority: int | None = None
    """Smallest `priority` that clients may ask for: smaller runs first, and what runs may be put off for it; by default
    0 where there are API keys or anyone may ask (--allow-open), otherwise any."""
    allowed_host: tuple[str, ...] = ()
    """Name under which clients may reach a server without API keys on this machine, beside localhost and names without
    a dot; may be given several times. Others are refused: a web page could use them to ask in its visitor's name."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Largest request body."""
    max_prompts: int = 256
    """Prompts in one completions request."""
    max_embedding_inputs: int = 2048
    """Inputs in one embeddings request."""
    max_choices: int = 128
    """Largest `n`, and largest prompts times `n` beyond one a prompt."""
    body_timeout_s: float = 60.0
    """How long a client may take to send its body."""
    keep_alive_s: float = 10.0
    """Silence in a stream after which a comment keeps the connection open."""
    drain_timeout_s: float = 30.0
    """How long running requests may go on after SIGTERM."""
    state: bool = True
    """Keep responses, conversations, files and batches on disk, across restarts; otherwise in memory."""
    state_dir: Path | None = None
    """Where they are kept; by default `state` in TOKENMILL_HOME."""
    max_state_bytes: int = 4 << 30
    """Most bytes of stored responses and conversations together, and of results of batches; what was not used for
    longest goes first."""
    max_file_bytes: int = 200 << 20
    """Largest file that a client may send (/v1/files)."""
    max_files_bytes: int = 8 << 30
    """Most bytes of all such files together, results of batches included; those that were not used for longest go
    first."""
    ledger: bool | None = None
    """Keep a row for every generation in the state: key, user, model, tokens, times, how it ended (`tokenmill usage`,
    GET /v1/usage); by default where there are API keys."""
    audit_log: Path | None = None
    """File for the audit log: refused keys, changed keys, loads of models, restarts of engines, chained by hashes
    (`tokenmill audit verify`); where there are API keys, by default audit.jsonl beside their file, or else with the
    server's state."""
    metrics_names: Literal["tokenmill", "vllm", "both"] = "tokenmill"
    """Names of the series of /metrics: ours, those that vLLM's dashboards ask for, or both."""
    otlp_endpoint: str | None = None
    """Where spans of requests are sent, such as http://collector:4318 (OpenTelemetry, OTLP over HTTP); needs
    `pip install tokenmill[traces]`. Never any text."""
    trace_share: float = 1.0
    """Share of the requests that are traced, from 0 to 1; those that come with a trace context follow its decision."""
    request_log: Path | None = None
    """Folder for a log of requests with their texts, which is not kept otherwise; replay it with `tokenmill bench serve
    --trace`."""
    request_log_share: float = 1.0
    """Share of the requests that the request log keeps, from 0 to 1."""
    request_log_redact: bool = True
    """Replace mail addresses, phone numbers, cards, IBANs, IP addresses and keys in the request log."""
    request_log_bytes: int = 1 << 30
    """Most bytes of the request log; the oldest lines go first."""
    response_cache_mb: float = 0.0
    """Memory for answers that are given again to the same request, in MB; 0: none. Only where the answer can't be
    another one: greedy or with a seed, on a CPU or with --deterministic; never across API keys."""
    response_cache_s: float = 3600.0
    """How long such an answer is kept."""
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = "reasoning_content"
    """Under which name OpenAI chat clients get what a model thought; newer vLLM clients read `reasoning`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """How much is logged; `info` writes one line a request, never its text."""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and not low <= value <= high:
                    raise InvalidConfig(f"{name} must be between {low} and {high}, got {value}", param=name)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidConfig("--tls-cert and --tls-key belong together", param="tls_cert")
        if not self.port:
            raise InvalidConfig("a server needs a port to listen on", param="port")
        fixed = [port for port in self.port if port]
        if len(set(fixed)) < len(fixed):
            raise InvalidConfig("the same port is given twice", param="port")


DAY_S = 86_400.0
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65_535),
    "max_loaded_models": (1, 1 << 20),
    "replicas": (1, 64),
    "model_memory_gb": (0.001, 1e6),
    "max_body_bytes": (1, 1 << 40),
    "max_prompts": (1, 1 << 20),
    "max_embedding_inputs": (1, 1 << 20),
    "max_choices": (1, 1 << 20),
    "max_state_bytes": (1 << 20, 1 << 50),
    "max_file_bytes": (1, 1 << 40),
    "max_files_bytes": (1 << 20, 1 << 50),
    "body_timeout_s": (0.001, DAY_S),
    "keep_alive_s": (0.001, DAY_S),
    "drain_timeout_s": (0.0, DAY_S),
    "trace_share": (0.0, 1.0),
    "response_cache_mb": (0.0, 1e6),
    "response_cache_s": (0.0, 365 * DAY_S),
    "request_log_share": (0.0, 1.0),
    "request_log_bytes": (1 << 20, 1 << 50),
}
