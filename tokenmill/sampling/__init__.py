"""From logits to tokens: per-row parameters, logits steps, the draw, log-probabilities."""
