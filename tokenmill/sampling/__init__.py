"""From logits to tokens: per-row knobs, logits steps, the draw, log-probabilities."""
