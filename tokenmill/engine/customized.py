"""Requests to a model made with `tokenmill create`: sent to its base model, with the created model's own system prompt,
first messages, template and adapter."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256

import msgspec

from tokenmill.config import EngineConfig
from tokenmill.store.layout import Customization
from tokenmill.types import ChatRequest, Message

CREATED = "created/"  # prefix of the adapter names of created models, which are not listed as models


def own_adapter(custom: Customization) -> str | None:
    """Return the name of a created model's adapter in the engine; None if it has none."""
    return f"{CREATED}{sha256(custom.adapter.encode()).hexdigest()[:12]}" if custom.adapter else None


def with_own_adapter(config: EngineConfig, custom: Customization | None) -> EngineConfig:
    """Return the engine config for a created model, which loads its adapter with the model."""
    name = None if custom is None else own_adapter(custom)
    if custom is None or name is None:
        return config
    adapters = (*config.model.adapter, f"{name}={custom.adapter}")
    return replace(config, model=replace(config.model, adapter=adapters))


def customized(request: ChatRequest, custom: Customization) -> ChatRequest:
    """Return the request with the created model's first messages and template, and with its system prompt unless the
    request has one."""
    first = [Message(role=role, content=content) for role, content in custom.messages]
    if custom.system and request.messages and request.messages[0].role != "system":
        first.insert(0, Message(role="system", content=custom.system))
    template = request.chat_template or custom.template or None
    request = msgspec.structs.replace(request, messages=[*first, *request.messages], chat_template=template)
    return msgspec.structs.replace(request, adapter=request.adapter or own_adapter(custom))
