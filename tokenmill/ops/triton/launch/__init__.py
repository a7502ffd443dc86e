"""Compilation and launch of kernels: the launcher, compile workers, programmatic dependent launch, capabilities."""
