"""Mixture of experts: top-k routing, sorting tokens by expert, GEMV and grouped GEMM."""
