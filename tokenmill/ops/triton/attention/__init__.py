"""Attention kernels: decode, prefill, fused decode, cache writes."""
