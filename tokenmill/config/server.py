"""Settings of the server. The docstring under a field is its help text on the command line.

The limits on client input are here. `api_key` is excluded from the repr, so that it never appears in logs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tokenmill.errors import InvalidConfig


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on; addresses other than loopback need an API key or --allow-open."""
    port: tuple[int, ...] = (8000,)
    """Port to listen on; 0 picks a free one. May be given several times, for example 11434 as well for Ollama
    clients."""
    api_key: tuple[str, ...] = field(default=(), repr=False)
    """Key that clients must send, as `Authorization: Bearer KEY` or `x-api-key: KEY`; may be given several times."""
    api_key_file: Path | None = None
    """File with one API key per line; empty lines and lines starting with # are skipped."""
    keys_file: Path | None = None
    """TOML file of API keys managed by `tokenmill keys` (digests, expiry, allowed models); reloaded on SIGHUP. By
    default keys.toml in TOKENMILL_HOME, if it exists."""
    tls_cert: Path | None = None
    """File with the server's certificate chain (PEM), for HTTPS; reloaded on SIGHUP."""
    tls_key: Path | None = None
    """File with the certificate's private key (PEM)."""
    allow_open: bool = False
    """Allow listening on other addresses than loopback without an API key."""
    public_metrics: bool = False
    """Serve /metrics without an API key."""
    cors_origin: tuple[str, ...] = ()
    """Origin whose web pages may call this server (CORS); `*` for all; may be given several times."""
    any_model_name: bool = False
    """Use the first model for requests with an unknown or missing model name."""
    alias: tuple[str, ...] = ()
    """Alias of the first model, optionally with wildcards (`claude-sonnet-*`); may be given several times. Aliases of
    other models are set in the settings file."""
    model_keep_alive: str | None = None
    """How long an idle model stays in memory, such as `10m`; 0: it is unloaded at once; -1 (the default): until memory
    is needed. The only model of a server is never unloaded unless this is set."""
    max_loaded_models: int | None = None
    """Maximum number of models in memory; by default as many as fit."""
    model_memory_gb: float | None = None
    """Memory for all models together, in GB; by default the free memory at start (on a GPU, all of its memory)."""
    replicas: int = 1
    """Engine processes per model; requests are routed by cached prefix and load. On CPUs replicas share threads and
    memory; on GPUs each has its own device."""
    roles: str | None = None
    """Role of each replica, separated by commas: `prefill` computes long prompts, `decode` generates from prompts
    computed there, so that prompts do not delay its streams, `any` (the default) does both."""
    manage_models: bool | None = None
    """Let clients load, unload, pull, create, copy, delete and upload models (Ollama's /api routes). By default only if
    the server listens on loopback; with several API keys, only for keys with `--sees-all`."""
    share_cache: bool = False
    """Share cached prompts between API keys. Clients can then infer what others have sent, from the number of cached
    tokens and from response times."""
    min_priority: int | None = None
    """Minimum `priority` of clients' requests; requests with smaller values run first and may preempt others. By
    default 0 with API keys or --allow-open, otherwise unlimited."""
    allowed_host: tuple[str, ...] = ()
    """Further host name accepted by a server without API keys, in addition to localhost and names without a dot; may be
    given several times. Other names are refused, to prevent DNS rebinding attacks by web pages."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Maximum size of a request body."""
    max_prompts: int = 256
    """Maximum number of prompts in a completions request."""
    max_embedding_inputs: int = 2048
    """Maximum number of inputs in an embeddings request."""
    max_choices: int = 128
    """Maximum `n`, and maximum number of prompts times `n` if `n` is above 1."""
    body_timeout_s: float = 60.0
    """Maximum time for a client to send a request body."""
    keep_alive_s: float = 10.0
    """Time without events after which a stream sends a comment to keep the connection open."""
    drain_timeout_s: float = 30.0
    """Maximum time for running requests to finish after SIGTERM."""
    state: bool = True
    """Store responses, conversations, files and batches on disk, so that they survive restarts; otherwise in memory."""
    state_dir: Path | None = None
    """Folder for that state; by default `state` in TOKENMILL_HOME."""
    max_state_bytes: int = 4 << 30
    """Maximum size of stored responses and conversations together, and of batch results; the least recently used are
    deleted first."""
    max_file_bytes: int = 200 << 20
    """Maximum size of an uploaded file (/v1/files)."""
    max_files_bytes: int = 8 << 30
    """Maximum size of all uploaded files and batch results together; the least recently used are deleted first."""
    ledger: bool | None = None
    """Record every generation in a usage ledger: key, user, model, tokens, times, finish reason (`tokenmill usage`,
    GET /v1/usage); by default if there are API keys."""
    audit_log: Path | None = None
    """Audit log of refused keys, key changes, model loads and engine restarts, protected by a hash chain (`tokenmill
    audit verify`). With API keys the default is audit.jsonl next to their file, or in the state folder."""
    metrics_names: Literal["tokenmill", "vllm", "both"] = "tokenmill"
    """Names of the series in /metrics: Tokenmill's, those of vLLM (for its dashboards), or both."""
    otlp_endpoint: str | None = None
    """OpenTelemetry collector for request spans, such as http://collector:4318 (OTLP over HTTP); needs
    `pip install tokenmill[traces]`. Spans never contain prompts or answers."""
    trace_share: float = 1.0
    """Share of requests that are traced, from 0 to 1; for requests with a trace context, its sampling decision
    holds."""
    request_log: Path | None = None
    """Folder for a log of requests including their texts (off by default); replay it with `tokenmill bench serve
    --trace`."""
    request_log_share: float = 1.0
    """Share of requests written to the request log, from 0 to 1."""
    request_log_redact: bool = True
    """Redact e-mail addresses, phone numbers, card numbers, IBANs, IP addresses and keys in the request log."""
    request_log_bytes: int = 1 << 30
    """Maximum size of the request log; the oldest lines are deleted first."""
    response_cache_mb: float = 0.0
    """Memory for cached responses to identical requests, in MB; 0 disables the cache. Only for deterministic answers:
    greedy or with a seed, on a CPU or with --deterministic. Never shared between API keys."""
    response_cache_s: float = 3600.0
    """Lifetime of a cached response."""
    reasoning_field: Literal["reasoning_content", "reasoning", "both"] = "reasoning_content"
    """Field for reasoning text in OpenAI chat responses; newer vLLM clients read `reasoning`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level; `info` logs one line per request, never its text."""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and not low <= value <= high:
                    raise InvalidConfig(f"{name} must be between {low} and {high}, got {value}", param=name)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise InvalidConfig("--tls-cert and --tls-key must be given together", param="tls_cert")
        if not self.port:
            raise InvalidConfig("the server needs at least one port", param="port")
        fixed = [port for port in self.port if port]
        if len(set(fixed)) < len(fixed):
            raise InvalidConfig("a port is given twice", param="port")


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
