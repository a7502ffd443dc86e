"""A conversation with a created model: the one it was made from is asked, with the created model's own words first."""

from __future__ import annotations

import msgspec

from tokenmill.store.layout import Customization
from tokenmill.types import ChatRequest, Message


def customized(request: ChatRequest, custom: Customization) -> ChatRequest:
    """The request with a created model's first messages and template, and its system prompt unless it has its own."""
    first = [Message(role=role, content=content) for role, content in custom.messages]
    if custom.system and request.messages and request.messages[0].role != "system":
        first.insert(0, Message(role="system", content=custom.system))
    template = request.chat_template or custom.template or None
    return msgspec.structs.replace(request, messages=[*first, *request.messages], chat_template=template)
