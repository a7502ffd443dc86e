"""Weights of a model: find, check, read under our own names, quantise and dequantise."""
