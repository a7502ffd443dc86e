"""The KV cache: which blocks there are and who holds them (`cache`, bookkeeping only), and the tensors behind them
(`storage`)."""
