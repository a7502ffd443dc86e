"""Ranks that compute one model together: how its matrices are divided among them, and how they exchange results."""
