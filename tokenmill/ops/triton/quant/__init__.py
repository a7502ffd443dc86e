"""Quantised weights: packed integers, fp8, their products, norms fused with quantisation."""
