"""Models that run a spec: a decoder made of ops, its parts, and the interface to the runner (`protocol`)."""
