"""From logits to tokens: per-row parameters, sampler steps, sampling, log-probabilities."""
