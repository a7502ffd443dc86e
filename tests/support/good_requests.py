"""A valid body for every route that takes one, with as many fields as can be combined, for the model `scripted`."""

from __future__ import annotations

from typing import Any

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOLS = [{"type": "function", "function": FUNCTION}]
SAMPLING = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 1,
    "stop": ["x"],
    "logit_bias": {"5": 1},
}
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}}
TURNS = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    {"role": "user", "content": "So?", "name": "ada"},
]
BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "t", "signature": "s"},
            {"type": "tool_use", "id": "i", "name": "f", "input": {"a": "b"}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "i", "content": [{"type": "text", "text": "r"}]}],
    },
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "AAAA"},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "noon"},
    {"role": "user", "content": "So?"},
]
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
MESSAGES = {
    "model": "scripted",
    "max_tokens": 9,
    "messages": BLOCKS,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "metadata": {"user_id": "u"},
    "stop_sequences": ["x"],
    "temperature": 0.5,
}
RESPONSE = {
    "model": "scripted",
    "input": ITEMS,
    "instructions": "Be short.",
    "tools": [{"type": "function", **FUNCTION}, {"type": "custom", "name": "g", "format": {"type": "text"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 9,
}
OLLAMA = {"model": "scripted", "stream": False, "keep_alive": "5m", "options": {"num_predict": 9, "temperature": 0.5}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        **SAMPLING,
        "model": "scripted",
        "messages": TURNS,
        "tools": TOOLS,
        "tool_choice": "auto",
        "max_tokens": 9,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "reasoning_effort": "low",
        "metadata": {"a": "b"},
        "user": "u",
        "stream_options": {"include_usage": True},
        "stream": True,
    },
    "/v1/completions": {
        **SAMPLING,
        "model": "scripted",
        "prompt": ["Hi", "Ho"],
        "max_tokens": 9,
        "echo": True,
        "logprobs": 2,
        "response_format": FORMAT,
    },
    "/v1/embeddings": {"model": "scripted", "input": ["Hi", "Ho"], "encoding_format": "base64", "dimensions": 4},
    "/v1/responses": RESPONSE,
    "/v1/responses/input_tokens": {
        name: RESPONSE[name] for name in ("model", "input", "instructions", "tools", "text")
    },
    "/v1/conversations": {"items": ITEMS[:1], "metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}": {"metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}/items": {"items": ITEMS[:2]},
    "/v1/messages": MESSAGES,
    "/v1/messages/count_tokens": {name: MESSAGES[name] for name in ("model", "messages", "system", "tools")},
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": MESSAGES}]},
    "/v1/batches": {
        "input_file_id": "file-1",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        "metadata": {},
    },
    "/completion": {
        **SAMPLING,
        "prompt": ["Hi", 5],
        "n_predict": 9,
        "n_probs": 2,
        "cache_prompt": True,
        "json_schema": SCHEMA,
    },
    "/infill": {
        "input_prefix": "a",
        "input_suffix": "b",
        "input_extra": [{"filename": "f", "text": "t"}],
        "n_predict": 9,
    },
    "/apply-template": {"messages": TURNS, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}},
    "/api/chat": {
        **OLLAMA,
        "messages": [{"role": "user", "content": "Hi"}, {"role": "tool", "tool_name": "f", "content": "noon"}],
        "tools": TOOLS,
        "think": "low",
    },
    "/api/generate": {**OLLAMA, "prompt": "Hi", "system": "Be short.", "format": SCHEMA, "think": False},
    "/api/embed": {"model": "scripted", "input": ["Hi"], "truncate": True, "options": {}},
    "/api/embeddings": {"model": "scripted", "prompt": "Hi"},
    "/api/show": {"model": "scripted", "verbose": True},
    "/api/pull": {"model": "nothing/like-this", "stream": False},
    "/api/create": {"model": "new", "from": "scripted", "system": "s", "parameters": {"top_k": 5}, "stream": False},
    "/api/copy": {"source": "scripted", "destination": "other"},
    "/api/delete": {"model": "other"},
    "/generate": {
        "inputs": "Hi",
        "parameters": {"max_new_tokens": 9, "details": True, "stop": ["x"], "top_n_tokens": 2},
    },
    "/tokenize": {"model": "scripted", "messages": TURNS[:2], "add_generation_prompt": True},
    "/detokenize": {"model": "scripted", "tokens": [5, 6]},
    "/models/load": {"model": "scripted"},
    "/replicas/scale": {"model": "scripted", "replicas": 1},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/ui/abort": {"id": "x"},
}
GOOD["/generate_stream"] = GOOD["/"] = GOOD["/generate"]
