"""Speculation: proposers, how likely their guesses are right, how many of them pay. Verifying is the
sampler's."""
