"""What a model is, as data without torch: specs, readers of configs and GGUF headers, names of weights, cost."""
