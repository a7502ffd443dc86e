"""The verbs of the command line, by name; nothing is imported for them."""

from __future__ import annotations

# A verb's line is what `--help` shows; where its function is, `dispatch.ENTRY_POINTS` says.
VERBS = {
    "run": "Answer one prompt on stdout, streamed; reads stdin when piped",
    "chat": "Talk with a model in the terminal",
    "serve": "Serve a model over HTTP",
    "up": "Plan, start and watch a cluster: replicas here and on other machines",
    "host": "Run replicas of a cluster on this machine, for a front elsewhere",
    "scale": "Change how many replicas a running cluster has",
    "drain": "Move the requests of a replica to others",
    "roll": "Start the replicas of a server anew, one after the other; no request fails",
    "batch": "Answer every row of a file into another one; resumable",
    "pull": "Fetch a model into the store",
    "list": "List the models in the store",
    "show": "Describe a model, and what of it fits here",
    "rm": "Remove models from the store",
    "verify": "Check the files of stored models against their digests",
    "ps": "List the models of a running server",
    "stop": "Take models out of a running server's memory",
    "create": "Make a model from another one by a Modelfile",
    "keys": "Make, list and revoke the API keys of a server",
    "usage": "Requests and tokens of a server, by key, user, model or day",
    "audit": "Show and verify the audit log of a server",
    "service": "Let systemd start, watch and restart a server",
    "plan": "Memory, speed and price of a model on a device, before buying it",
    "detect": "Tell whether a text carries a watermark",
    "bench": "Measure: offline, serve, search, startup, latency, compare, report",
    "tune": "Measure by which numbers kernels are chosen on this GPU",
    "completion": "Let bash, zsh or fish complete commands and flags",
    "doctor": "What this machine has, what is chosen and why, what to fix",
}
