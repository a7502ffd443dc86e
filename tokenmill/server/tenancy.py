"""What keeps tenants apart: clients with different API keys learn nothing of each other's prompts and answers.

Blocks of the prefix cache, and recent answers from which speculation guesses, are shared by requests with the same
salt. The number of cached tokens, the number of accepted guesses and the time of a first token would all tell a client
whether another one sent the same beginning. So every key has salts of its own, made with a secret that lives as long as
this process; what a client says in `cache_salt` divides its own share further.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace

import msgspec

from tokenmill.server.errors import ModelNotAllowed
from tokenmill.server.generation import GenerationJob
from tokenmill.server.keys import KeyRecord

_SECRET = secrets.token_bytes(32)


def own_salt(key_id: str, salt: str) -> str:
    """The salt of a key's requests; no other key can have it, whatever its clients send."""
    return hmac.digest(_SECRET, f"{key_id}\0{salt}".encode(), "sha256").hex()


def require_allowed(job: GenerationJob, key: KeyRecord | None) -> None:
    """Refuse a model that a key may not use."""
    model = job.engine.info.name
    if key is not None and not key.may_use(model):
        raise ModelNotAllowed(f"this API key may not use the model {model}", param="model")


def with_own_salts(job: GenerationJob, key_id: str) -> GenerationJob:
    """A job whose requests share cached work with those of the same key only."""
    requests = [
        msgspec.structs.replace(request, cache_salt=own_salt(key_id, request.cache_salt)) for request in job.requests
    ]
    return replace(job, requests=requests)
