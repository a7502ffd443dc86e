"""The tool-call formats of all model families, one row each.

Families with the same format share a row. The order matters only for templates that write no calls themselves: of the
rows whose opening marker such a template mentions, the first is used (`detect.py`). CONTRIBUTING says how to add a row.
"""

from __future__ import annotations

from tokenmill.text.speech.call_format import CallFormat

_NAME_ARGUMENTS = '{"name": "§name", "arguments": §args}'
_NAME_ARGUMENTS_ID = '{"name": "§name", "arguments": §args, "id": "§id"}'


def _json_list(name: str, opening: str, closing: str, call: str = _NAME_ARGUMENTS) -> CallFormat:
    return CallFormat(name, call, join=", ", section=(f"{opening}[", f"]{closing}"))


JSON_OBJECTS = (
    CallFormat("hermes", f"<tool_call>\n{_NAME_ARGUMENTS}\n</tool_call>", join="\n"),
    CallFormat("hermes-tight", f"<tool_call>\n{_NAME_ARGUMENTS}\n</tool_call>"),
    _json_list("json-list", "<tool_calls>", "</tool_calls>"),
    _json_list("json-list-id", "<tool_calls>", "</tool_calls>", _NAME_ARGUMENTS_ID),
    _json_list("nemotron", "<TOOLCALL>", "</TOOLCALL>"),
    CallFormat("functools", _NAME_ARGUMENTS, join=", ", section=("functools[", "]"), mentions=("functools[",)),
    _json_list("phi-4", "<|tool_call|>", "<|/tool_call|>"),
    _json_list("granite-3", "<|tool_call|>", ""),
    CallFormat("minimax-m1", _NAME_ARGUMENTS, join="\n", section=("<tool_calls>\n", "\n</tool_calls>")),
    _json_list("apertus", "<|tools_prefix|>", "<|tools_suffix|>", '{"§name": §args}'),
    CallFormat("llama3", '{"name": "§name", "parameters": §args}', join="; ", also_opens=("<|python_tag|>",)),
    CallFormat("mistral-nemo", _NAME_ARGUMENTS_ID, join=", ", section=("[TOOL_CALLS][", "]"), ids="nine"),
    CallFormat(
        "cohere",
        '{"tool_call_id": "§index", "tool_name": "§name", "parameters": §args}',
        join=",\n    ",
        section=("<|START_ACTION|>[\n    ", "\n]<|END_ACTION|>"),
    ),
    CallFormat(
        "command-r-plus",
        '    {\n        "tool_name": "§name",\n        "parameters": §args\n    }',
        join=",\n",
        section=("Action:\n```json\n[\n", "\n]```"),
        args_indent=(4, 8),
    ),
    CallFormat("gigachat-3", f"function call<|role_sep|>\n{_NAME_ARGUMENTS}", ignored=("<|message_sep|>",)),
    CallFormat("gigachat-3.1", f"<|function_call|>{_NAME_ARGUMENTS}"),
)

NAME_THEN_JSON = (
    CallFormat("mistral", "[TOOL_CALLS]§name[ARGS]§args", ids="nine"),
    CallFormat("mistral-id", "[TOOL_CALLS]§name[CALL_ID]§id[ARGS]§args", ids="nine"),
    CallFormat(
        "deepseek-r1",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>§name\n```json\n§args\n```<｜tool▁call▁end｜>",
        join="\n",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallFormat(
        "deepseek-v3.1",
        "<｜tool▁call▁begin｜>§name<｜tool▁sep｜>§args<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    ),
    CallFormat(
        "kimi-k2",
        "<|tool_call_begin|>functions.§name:§index<|tool_call_argument_begin|>§args<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        ids="functions",
    ),
    CallFormat("functionary-3.1", "<function=§name>§args</function>"),
    CallFormat("functionary-3.2", ">>>§name\n§args", prompt=">>>", ignored=(">>>all\n",)),
    CallFormat(
        "solar",
        "<|tool_call:begin|>§id<|tool_call:name|>§name<|tool_call:args|>§args<|tool_call:end|>",
        section=("<|tool_calls|>", ""),
        ignored=("<|calls|>",),
    ),
    CallFormat(
        "harmony",
        "§args<|call|>",
        header="<|start|>assistant to=functions.§name<|channel|>commentary json<|message|>",
    ),
)


def _dsml(name: str, section: str) -> CallFormat:
    return CallFormat(
        name,
        '<｜DSML｜invoke name="§name">\n§args\n</｜DSML｜invoke>',
        join="\n",
        section=(f"<｜DSML｜{section}>\n", f"\n</｜DSML｜{section}>"),
        arg='<｜DSML｜parameter name="§key" string="§is_string">§value</｜DSML｜parameter>',
        arg_join="\n",
        values="raw",
    )


_MINIMAX = "]<]minimax[>["
_QWEN_CODER = "<tool_call>\n<function=§name>\n§args</function>\n</tool_call>"
_QWEN_ARGUMENT = "<parameter=§key>\n§value\n</parameter>\n"

TAGGED = (
    CallFormat("qwen3-coder", _QWEN_CODER, join="\n", arg=_QWEN_ARGUMENT, values="raw"),
    CallFormat("qwen3-coder-tight", _QWEN_CODER, arg=_QWEN_ARGUMENT, values="raw"),
    CallFormat(
        "seed-oss",
        "<seed:tool_call>\n<function=§name>\n§args</function>\n</seed:tool_call>",
        join="\n",
        arg="<parameter=§key>§value</parameter>\n",
        values="raw_python",
    ),
    CallFormat(
        "minimax-m2",
        '<invoke name="§name">\n§args</invoke>',
        join="\n",
        section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
        arg='<parameter name="§key">§value</parameter>\n',
        values="raw",
    ),
    CallFormat(
        "minicpm-5",
        '<function name="§name">§args</function>',
        join="\n",
        arg='<param name="§key">§value</param>',
        values="raw_python",
        has_cdata=True,
    ),
    CallFormat(
        "glm-4.5",
        "<tool_call>§name\n§args</tool_call>",
        join="\n",
        arg="<arg_key>§key</arg_key>\n<arg_value>§value</arg_value>\n",
        values="raw",
    ),
    CallFormat(
        "glm-4.7",
        "<tool_call>§name§args</tool_call>",
        arg="<arg_key>§key</arg_key><arg_value>§value</arg_value>",
        values="raw",
    ),
    CallFormat(
        "hunyuan-3",
        "<tool_call:opensource>§name<tool_sep:opensource>\n§args</tool_call:opensource>",
        join="\n",
        section=("<tool_calls:opensource>\n", "\n</tool_calls:opensource>"),
        arg="<arg_key:opensource>§key</arg_key:opensource>\n<arg_value:opensource>§value</arg_value:opensource>\n",
        values="raw",
    ),
    CallFormat(
        "minimax-m3",
        f'{_MINIMAX}<invoke name="§name">§args{_MINIMAX}</invoke>\n',
        section=(f"{_MINIMAX}<tool_call>\n", f"{_MINIMAX}</tool_call>"),
        arg=f"{_MINIMAX}<§key>§value{_MINIMAX}</§key>",
        values="nested",
    ),
    _dsml("deepseek-v3.2", "function_calls"),
    _dsml("deepseek-v4", "tool_calls"),
    CallFormat(
        "kimi-k3",
        '<|open|>call tool="§name" index="§index"<|sep|>§args<|close|>call<|sep|>',
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        arg='<|open|>argument key="§key" type="§type"<|sep|>§value<|close|>argument<|sep|>',
        values="raw",
        first_index=1,
    ),
    CallFormat(
        "muse",
        '<atem:function_calls>\n<atem:invoke name="§name">\n§args</atem:invoke>\n</atem:function_calls>',
        join="<|eom|>",
        arg='<atem:parameter name="§key">§value</atem:parameter>\n',
        values="raw",
        header="<|start|>assistant to=§name<|message|>",
    ),
)

FIELDS = (
    CallFormat(
        "pythonic",
        "§name(§args)",
        join=", ",
        section=("<|tool_call_start|>[", "]<|tool_call_end|>"),
        arg="§key=§value",
        arg_join=", ",
        values="python",
        mentions=("List of tools: ",),
    ),
    CallFormat(
        "pythonic-bare",
        "§name(§args)",
        join=", ",
        section=("[", "]"),
        arg="§key=§value",
        arg_join=", ",
        values="python",
    ),
    CallFormat("gemma-4", "<|tool_call>call:§name{§args}<tool_call|>", arg="§key:§value", arg_join=",", values="gemma"),
)

CALL_FORMATS = (*JSON_OBJECTS, *NAME_THEN_JSON, *TAGGED, *FIELDS)
