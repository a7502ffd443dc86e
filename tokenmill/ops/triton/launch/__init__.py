"""How kernels are compiled and launched: the launcher, compile workers, programmatic dependent launch, capabilities."""
