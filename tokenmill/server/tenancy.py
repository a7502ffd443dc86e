"""Isolation of tenants: clients with different API keys learn nothing of each other's prompts and answers.

Blocks of the prefix cache, and recent answers from which speculation guesses, are shared by requests with the same
salt. The number of cached tokens, the number of accepted guesses and the time of a first token would all tell a client
whether another one sent the same beginning. So every key has salts of its own, made with a secret that lives as long as
this process; what a client says in `cache_salt` divides its own share further.

A key is also a tenant of the engine, which gives each its share by weight (scheduler/tenants.py).
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace

import msgspec

from tokenmill.server.errors import ModelNotAllowed
from tokenmill.server.generation import GenerationJob
from tokenmill.server.keys import KeyRecord
from tokenmill.types import Tenant

_SECRET = secrets.token_bytes(32)


def own_salt(key_id: str, salt: str) -> str:
    """The salt of a key's requests; no other key can have it, whatever its clients send."""
    return hmac.digest(_SECRET, f"{key_id}\0{salt}".encode(), "sha256").hex()


def require_allowed(job: GenerationJob, key: KeyRecord | None) -> None:
    """Refuse a model that a key may not use."""
    model = job.engine.info.name
    if key is not None and not key.may_use(model):
        raise ModelNotAllowed(f"this API key may not use the model {model}", param="model")


def as_tenant(job: GenerationJob, key_id: str, key: KeyRecord | None, *, shares_cache: bool) -> GenerationJob:
    """Return a job whose requests belong to a key: they have its share of the engine, and share cached prefixes only
    with the same key's requests, unless all keys share them."""
    tenant = Tenant(id=key_id) if key is None else Tenant(id=key_id, weight=key.weight, max_sequences=key.max_sequences)
    requests = [
        msgspec.structs.replace(
            request,
            tenant=tenant,
            cache_salt=request.cache_salt if shares_cache else own_salt(key_id, request.cache_salt),
        )
        for request in job.requests
    ]
    return replace(job, requests=requests)
