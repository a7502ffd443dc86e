"""Norms, activations, gathers."""
