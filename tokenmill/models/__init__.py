"""How a spec runs: a decoder made of ops, its parts, and what the runner asks of any model (`protocol`)."""
