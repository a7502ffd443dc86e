"""A session with Anthropic's SDK of either generation: python anthropic_session.py URL. Prints one JSON object."""

import json
import sys

import anthropic

MODEL = "scripted"
client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def both(**asked):
    """The reply, whole; the same streamed and put together by the SDK must be equal."""
    whole = client.messages.create(model=MODEL, max_tokens=2000, **asked).to_dict()
    with client.messages.stream(model=MODEL, max_tokens=2000, **asked) as stream:
        kinds = [event.type for event in stream]
        folded = stream.get_final_message().to_dict()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop", kinds
    for reply in (whole, folded):
        reply.pop("id")
        usage = reply["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
        for block in reply["content"]:
            block.pop("id", None)  # of a call: random
    assert whole == folded, (whole, folded)
    return whole


question = [{"role": "user", "content": "Say hello"}]
text = both(messages=question, system="Be brief.")
counted = client.messages.count_tokens(model=MODEL, messages=question, system="Be brief.").input_tokens
assert counted == text["usage"]["input_tokens"], (counted, text)

asked = [{"role": "user", "content": "What is the weather in Zürich?"}]
called = client.messages.create(model=MODEL, max_tokens=2000, messages=asked, tools=[WEATHER])
both(messages=asked, tools=[WEATHER])
(call,) = [block for block in called.content if block.type == "tool_use"]
result = {"type": "tool_result", "tool_use_id": call.id, "content": "22 degrees and sunny"}
turns = [*asked, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
answered = both(messages=turns, tools=[WEATHER])

thought = both(
    messages=[{"role": "user", "content": "Think hard"}], thinking={"type": "enabled", "budget_tokens": 1024}
)
json.dump(
    {
        "version": anthropic.__version__,
        "text": text["content"],
        "stop": [text["stop_reason"], called.stop_reason, answered["stop_reason"], thought["stop_reason"]],
        "call": [call.name, call.input],
        "answer": answered["content"],
        "thought": [(block["type"], block.get("thinking") or block.get("text")) for block in thought["content"]],
        "models": [model.id for model in client.models.list()],
    },
    sys.stdout,
)
