"""The arithmetic of a model as a table of functions (`interface`): torch's reference, Triton, native CPU kernels."""
