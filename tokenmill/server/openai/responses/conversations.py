"""The endpoints of /v1/conversations: lists of items to which several responses add.

A response that names a conversation continues it. When it is completed, its input and output items are appended.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.server.body import BodyFields, refuse, shown
from tokenmill.server.openai.params import parse_metadata
from tokenmill.server.openai.responses import schemas
from tokenmill.server.openai.responses.generate import ResponseGenerator
from tokenmill.server.openai.responses.items import Item, ItemReader, input_items, stored_item
from tokenmill.server.openai.responses.pages import item_page, list_object
from tokenmill.server.openai.responses.tools import OfferedTools
from tokenmill.server.request_ids import new_id
from tokenmill.server.routing import READING, Endpoint, RouteContext, json_response, owner_of
from tokenmill.server.state.rows import UnknownRow

MAX_ADDED = 20  # items per request, OpenAI's limit


def conversation_endpoints(context: RouteContext, generator: ResponseGenerator) -> list[Endpoint]:
    database, store = context.state.database, generator.store

    def checked_items(fields: BodyFields, owner: str) -> list[Item]:
        """Parse and check items as a response would; return them in the form in which they are stored."""
        items = input_items(fields, "items")
        if len(items) > MAX_ADDED:
            refuse("items", f"takes at most {MAX_ADDED} items, got {len(items)}")
        reader = ItemReader(generator.thought_keys.signer(owner), OfferedTools())
        for number, item in enumerate(items):
            reader.read(item, f"items[{number}]")
        return [stored_item(item) for item in items]

    async def create_conversation(request: Request) -> Response:
        fields = BodyFields(await context.parsed(request, dict[str, Any]))
        owner = owner_of(request)
        items, metadata = checked_items(fields, owner), parse_metadata(fields)
        make = partial(store.create_conversation, row_id=new_id("conv_"), owner=owner, metadata=metadata, items=items)
        return json_response(await database.write(make))

    async def conversation(request: Request) -> Response:
        return json_response(await database.read(partial(store.conversation, **named(request))))

    async def update_conversation(request: Request) -> Response:
        fields = BodyFields(await context.parsed(request, dict[str, Any]))
        change = partial(store.update_conversation, **named(request), metadata=parse_metadata(fields))
        return json_response(await database.write(change))

    async def delete_conversation(request: Request) -> Response:
        await database.write(partial(store.delete_conversation, **named(request)))
        return json_response({"id": named(request)["row_id"], "object": "conversation.deleted", "deleted": True})

    async def conversation_items(request: Request) -> Response:
        return json_response(item_page(await stored_items(request), request))

    async def add_conversation_items(request: Request) -> Response:
        fields = BodyFields(await context.parsed(request, dict[str, Any]))
        items = checked_items(fields, owner_of(request))
        if not items:
            refuse("items", "is required and must not be empty")
        await stored_items(request)  # raises if there is no such conversation
        await database.write(partial(store.append, **named(request), items=items))
        return json_response(list_object(items))

    async def conversation_item(request: Request) -> Response:
        item_id = request.path_params["item_id"]
        for item in await stored_items(request):
            if item["id"] == item_id:
                return json_response(item)
        raise UnknownRow(f"there is no item {shown(item_id)}", param="item_id")

    async def delete_conversation_item(request: Request) -> Response:
        item_id = request.path_params["item_id"]
        return json_response(await database.write(partial(store.delete_item, **named(request), item_id=item_id)))

    async def stored_items(request: Request) -> list[Item]:
        return await database.read(partial(store.conversation_items, **named(request)))

    path = "/v1/conversations"
    one, missing = f"{path}/{{conversation_id}}", (404,)
    reply, items_reply = schemas.CONVERSATION_REPLY, schemas.ITEMS_REPLY
    return [
        Endpoint("POST", path, create_conversation, "OpenAI", reply, READING, schemas.CONVERSATION_BODY),
        Endpoint("GET", one, conversation, "OpenAI", reply, missing),
        Endpoint("POST", one, update_conversation, "OpenAI", reply, READING, schemas.METADATA_BODY),
        Endpoint("DELETE", one, delete_conversation, "OpenAI", schemas.DELETED_REPLY, missing),
        Endpoint("GET", f"{one}/items", conversation_items, "OpenAI", items_reply, (400, 404)),
        Endpoint("POST", f"{one}/items", add_conversation_items, "OpenAI", items_reply, READING, schemas.ITEMS_BODY),
        Endpoint("GET", f"{one}/items/{{item_id}}", conversation_item, "OpenAI", schemas.ITEM, missing),
        Endpoint("DELETE", f"{one}/items/{{item_id}}", delete_conversation_item, "OpenAI", reply, missing),
    ]


class NamedConversation(TypedDict):
    """The id of a conversation, and its owner."""

    row_id: str
    owner: str


def named(request: Request) -> NamedConversation:
    return {"row_id": request.path_params["conversation_id"], "owner": owner_of(request)}
