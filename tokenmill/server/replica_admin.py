"""Endpoints that list, drain, restart and scale the replicas (engine processes) of loaded models."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from starlette.requests import Request
from starlette.responses import Response

from tokenmill.config.cluster import MAX_REPLICAS, replica_range
from tokenmill.errors import InvalidConfig, InvalidRequest
from tokenmill.server.auth import require_manager, require_operator
from tokenmill.server.body import BodyFields
from tokenmill.server.model_admin import FLAG, TAG
from tokenmill.server.routing import (
    COUNT,
    READING,
    TEXT,
    Endpoint,
    RouteContext,
    Schema,
    json_response,
    list_of,
    object_of,
)
from tokenmill.server.variants import gate_of


@runtime_checkable
class FleetEngine(Protocol):
    """An engine whose replicas can be drained, restarted and scaled."""

    def drain_replica(self, index: int, is_drained: bool = True) -> None: ...
    async def restart_replicas(self, index: int | None = None) -> list[int]: ...
    def scale_replicas(self, min_replicas: int, max_replicas: int) -> None: ...


REPLICA: Schema = object_of(
    model=TEXT,
    replica=COUNT,
    state={"enum": ["loading", "ready", "stalled", "draining", "stopped", "dead"]},
    detail=TEXT,
    is_drained=FLAG,
    role={"enum": ["any", "prefill", "decode"]},
    place=TEXT,
    requests=COUNT,
    prefill_tokens=COUNT,
    num_placed={"type": "object", "additionalProperties": COUNT},
    running=COUNT,
    waiting=COUNT,
    kv_blocks_used=COUNT,
    kv_blocks_total=COUNT,
    prefix_hit_tokens=COUNT,
    prefix_query_tokens=COUNT,
    steps=COUNT,
    failed_steps=COUNT,
    step_tokens=COUNT,
    busy_s={"type": "number"},
    preemptions=COUNT,
    engine_pid=COUNT,
    restarts=COUNT,
)


def replica_rows(context: RouteContext) -> list[dict[str, Any]]:
    """Return a row for each replica of the loaded models."""
    return [
        {"model": gate.label, **row}
        for gate in context.registry.gates
        if gate.loaded is not None
        for row in gate.loaded.replicas()
    ]


def replica_endpoints(context: RouteContext) -> list[Endpoint]:
    async def list_replicas(request: Request) -> Response:
        require_operator(request)
        return json_response({"object": "list", "data": replica_rows(context)})

    async def restart_replicas(request: Request) -> Response:
        require_manager(request, context.config)
        model, replica = await context.parsed(request, _parse_replica)
        return json_response({"success": True, "restarted": await _fleet_of(model, context).restart_replicas(replica)})

    async def drain_replica(request: Request) -> Response:
        require_manager(request, context.config)
        (model, replica), is_drained = await context.parsed(
            request, lambda body: (_parse_replica(body), BodyFields(body).boolean("is_drained", True))
        )
        if replica is None:
            raise InvalidRequest("replica is required", param="replica")
        _fleet_of(model, context).drain_replica(replica, is_drained)
        return json_response({"success": True, "replica": replica, "is_drained": is_drained})

    async def scale_replicas(request: Request) -> Response:
        require_manager(request, context.config)
        model, (least, most) = await context.parsed(request, _parse_range)
        _fleet_of(model, context).scale_replicas(least, most)
        return json_response({"success": True, "least": least, "most": most})

    changing = (*READING, 403)
    return [
        Endpoint(
            "GET",
            "/replicas",
            list_replicas,
            TAG,
            object_of(object=TEXT, data=list_of(REPLICA)),
            (403, 503),
            description="The replicas of loaded models: state, requests, KV blocks, totals since the start. "
            "With several API keys, it needs one with `sees_all`.",
        ),
        Endpoint(
            "POST",
            "/replicas/restart",
            restart_replicas,
            TAG,
            object_of(success=FLAG, restarted=list_of(COUNT)),
            changing,
            {"type": "object", "properties": {"model": TEXT, "replica": COUNT}},
            description="Restart all replicas one after the other, or one of them. No request fails.",
        ),
        Endpoint(
            "POST",
            "/replicas/drain",
            drain_replica,
            TAG,
            object_of(success=FLAG, replica=COUNT, is_drained=FLAG),
            changing,
            {
                "type": "object",
                "required": ["replica"],
                "properties": {"model": TEXT, "replica": COUNT, "is_drained": FLAG},
            },
            description="Move the requests of a replica to others and assign it no more, or put it to use again.",
        ),
        Endpoint(
            "POST",
            "/replicas/scale",
            scale_replicas,
            TAG,
            object_of(success=FLAG, least=COUNT, most=COUNT),
            changing,
            {
                "type": "object",
                "required": ["replicas"],
                "properties": {"model": TEXT, "replicas": {"anyOf": [COUNT, TEXT]}},
                "example": {"replicas": "1..4"},
            },
            description="Set the number of replicas of a cluster, or a range in which it follows the load.",
        ),
    ]


def _parse_replica(body: dict[str, Any]) -> tuple[str | None, int | None]:
    fields = BodyFields(body)
    return fields.text("model"), fields.integer("replica", 0, MAX_REPLICAS - 1)


def _parse_range(body: dict[str, Any]) -> tuple[str | None, tuple[int, int]]:
    fields = BodyFields(body)
    try:
        return fields.text("model"), replica_range(fields.get("replicas"))
    except InvalidConfig as problem:
        raise InvalidRequest(problem.message, param="replicas") from None


def _fleet_of(model: str | None, context: RouteContext) -> FleetEngine:
    """Return the engine of a loaded model; without a name the first model's."""
    gate = context.registry.default if model is None else gate_of(context.registry.find(model))
    engine: object = gate.loaded
    if not isinstance(engine, FleetEngine):
        raise InvalidRequest(f"{gate.label} is not loaded", param="model")
    return engine
