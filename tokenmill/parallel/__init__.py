"""Ranks: how a model is cut for several of them, and how they exchange what each has computed."""
