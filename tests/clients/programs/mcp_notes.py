"""An MCP server over standard input and output with one tool, `read_note`, for agents that bring such tools along."""

import json
import sys

SCHEMA = {"type": "object", "properties": {"title": {"type": "string"}}, "required": ["title"]}
TOOL = {"name": "read_note", "description": "Reads a note", "inputSchema": SCHEMA}


def answer(method: str, params: dict) -> dict:
    match method:
        case "initialize":
            about = {"name": "notes", "version": "1"}
            return {"protocolVersion": params["protocolVersion"], "capabilities": {"tools": {}}, "serverInfo": about}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": f"note {params['arguments']['title']}: the mill rests"}]}
        case _:
            return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:  # others are notifications
        result = answer(asked["method"], asked.get("params") or {})
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
