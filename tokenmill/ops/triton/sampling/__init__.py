"""Sampling on the device: argmax, draws, penalties."""
