"""The commands of `tokenmill`, without importing their code."""

from __future__ import annotations

# Command → its line in `tokenmill --help`. `dispatch.ENTRY_POINTS` has its function.
VERBS = {
    "run": "Answer one prompt on stdout; reads a prompt from a pipe",
    "chat": "Chat with a model in the terminal",
    "serve": "Serve a model over HTTP",
    "up": "Plan, start and autoscale a cluster of replicas, also on other machines",
    "host": "Run replicas on this machine for a cluster started elsewhere",
    "scale": "Change the number of replicas of a running cluster",
    "drain": "Move the requests of a replica to others",
    "roll": "Restart the replicas of a server one by one; no request fails",
    "batch": "Answer every row of a file; resumes after an interruption",
    "pull": "Download a model",
    "list": "List downloaded models",
    "show": "Describe a model and how well it fits this machine",
    "rm": "Delete downloaded models",
    "verify": "Check downloaded models against their checksums",
    "ps": "List the models of a running server",
    "stop": "Unload models from a running server's memory",
    "create": "Create a model from another one with a Modelfile",
    "keys": "Create, list and revoke the API keys of a server",
    "usage": "Report a server's requests and tokens by key, user, model or day",
    "audit": "Show and verify a server's audit log",
    "service": "Install a server as a systemd service",
    "plan": "Predict memory, speed and price of a model on a device",
    "detect": "Detect a watermark in a text",
    "bench": "Benchmarks: offline, latency, startup, serve, search, compare, report, links",
    "tune": "Measure the thresholds for kernel selection on this GPU",
    "completion": "Print a completion script for bash, zsh or fish",
    "doctor": "Check this machine: hardware, chosen settings and why, what to fix",
}
