"""Runs the steps that the scheduler plans: permanent rows, inputs, forward, draws. On a GPU ahead of the host."""
