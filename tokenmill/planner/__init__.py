"""Estimates of a model on a device before it runs: memory, speed, capacity, price. Does not import torch."""
