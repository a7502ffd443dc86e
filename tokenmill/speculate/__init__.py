"""Speculative decoding: proposers of draft tokens, acceptance rates, and the number of drafts that pays.

Verification is the sampler's (`sampling/sampler.py`): a draft token is right if it equals the token that is sampled.
"""
