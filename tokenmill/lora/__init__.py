"""Adapters: low-rank additions to a model's matrices (LoRA, rsLoRA, DoRA), read from PEFT folders and GGUF files."""
