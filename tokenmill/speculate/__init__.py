"""Speculative decoding: proposers of draft tokens, how likely those are right, how many of them pay.

Verification is the sampler's (`sampling/sampler.py`): a draft token is right if it equals the token that is sampled.
"""
