"""Recurrent mixers (gated DeltaNet, Mamba-2): tokens one by one, prompts by chunks of 64."""
