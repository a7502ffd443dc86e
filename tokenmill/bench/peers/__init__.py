"""Scripts that run one engine each and speak one protocol, so that engines can take turns on one machine.

Each is started as `PYTHON SCRIPT MODEL THREADS [MORE ...]` in whatever Python has that engine. It prints
`{"ready": true, ...}` when the model is loaded, then answers each line {"input_len", "output_len", "concurrency",
"seed"} on stdin with one line {"prefill_tok_s", "decode_tok_s"}. They import nothing of this package except `ours.py`,
which imports the engine.
"""
