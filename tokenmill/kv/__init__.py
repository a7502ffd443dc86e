"""The KV cache: which blocks there are and which sequences hold them (`blocks`, `cache`: bookkeeping only), how layers
share blocks (`layout`), and the tensors behind them (`storage`)."""
