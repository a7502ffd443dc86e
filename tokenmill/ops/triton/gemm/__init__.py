"""Matrix products of plain weights: GEMV, split-K, Hopper GEMM, epilogues, the deterministic kernel."""
