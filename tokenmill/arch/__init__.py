"""Models as data, without torch: specs, readers of configs and GGUF headers, names of weights, cost."""
