"""The script of the model behind the web page: plain answers, a tool call, markdown, and attacks on the page."""

from __future__ import annotations

import json
from typing import Any

TEMPLATE = """{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{"name": <function-name>, "arguments": <args-json-object>}
</tool_call><|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "tool" %}<tool_response>
{{ message.content }}
</tool_response>{% else %}{{ message.content or "" }}{% endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = [{"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}]
ARGUMENTS_SENT = {"city": "Paris", "day": "the day after tomorrow"}
CALL = f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': ARGUMENTS_SENT})}\n</tool_call>"
MARKDOWN = (
    "# Mills\n\n- one **bold** word\n- `code`\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n```python\nprint(1)  # hi\n```\n"
)
ATTACKS = [
    "<script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 2'>",
    "<svg onload='window.broken = 3'></svg>",
    "[click](javascript:window.broken=4)",
    "[click](JaVaScRiPt:window.broken=5)",
    "![x](javascript:window.broken=6)",
    "<iframe src='javascript:window.broken=7'></iframe>",
    "<a href='javascript:window.broken=8'>x</a>",
    "```html\n<script>window.broken = 9</script>\n```",
    "`<img src=x onerror=window.broken=10>`",
    "| <img src=x onerror=window.broken=11> | b |\n|---|---|\n| <script>window.broken=11</script> | 2 |",
    "# <img src=x onerror=window.broken=12>",
    "> <svg/onload=window.broken=13>",
    "- <details open ontoggle=window.broken=14>",
    '<https://x.example/"onmouseover="window.broken=15>',
    '[a](https://x.example/"onclick="window.broken=16)',
    "![picture](https://outside.example/track.png)",
    "<link rel=stylesheet href=https://outside.example/x.css><style>@import 'https://outside.example/y.css'</style>",
    "[x](data:text/html,<script>window.broken=19</script>) [y](vbscript:window.broken) [z](file:///etc/passwd)",
    "<form action=//outside.example><input onfocus=window.broken=20></form><base href=//outside.example>",
]
SCRIPT: dict[str, Any] = {
    "control_tokens": ["<|im_start|>", "<|im_end|>"],
    "added_tokens": ["<tool_call>", "</tool_call>"],
    "eos": "<|im_end|>",
    "answers": [
        {"match": "18 degrees", "say": "Take a coat."},
        {"match": "20 degrees", "say": "Take a hat."},
        {"match": "weather", "say": CALL, "token_delay_s": 0.01},
        {"match": "forever", "say": "word after word ", "repeat": True, "token_delay_s": 0.02},
        {"match": "markdown", "say": MARKDOWN},
        {"match": "break", "say": ["half an ans", {"fail": True}]},
        *(
            {"match": rf"attack {number}<\|im_end\|>\s*\S+assistant\s*$", "say": text}
            for number, text in enumerate(ATTACKS)
        ),
        {"match": "second", "say": "The second answer."},
        {"say": "A slow and steady answer, word by word.", "token_delay_s": 0.02},
    ],
}
