"""Isolation of tenants: clients with different API keys learn nothing about each other's prompts and answers.

Requests with the same salt share blocks of the prefix cache and the recent answers that speculation draws drafts from.
The number of cached tokens, the number of accepted draft tokens and the time to the first token would all tell a client
whether another one sent the same prefix. So every key has its own salts, derived with a secret of this process;
`cache_salt` divides a client's own cache further.

A key is also a tenant of the engine, which shares its time among tenants by weight (scheduler/tenants.py).
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
    """Return the salt of a key's requests. No other key can get the same salt, whatever its clients send."""
    return hmac.digest(_SECRET, f"{key_id}\0{salt}".encode(), "sha256").hex()


def require_allowed(model: str, key: KeyRecord | None) -> None:
    """Refuse a model that a key may not use."""
    if key is not None and not key.may_use(model):
        raise ModelNotAllowed(f"this API key may not use the model {model}", param="model")


def as_tenant(job: GenerationJob, key_id: str, key: KeyRecord | None, *, shares_cache: bool) -> GenerationJob:
    """Return a job whose requests belong to the tenant of a key: they get its share of the engine, and share cached
    prefixes only with the same key's requests, unless `shares_cache`."""
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
