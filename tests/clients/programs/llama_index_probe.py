"""llama-index: chat, stream, completion and a tool call through OpenAILike and Ollama."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from llama_index.llms.openai_like import OpenAILike

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
HELLO = "Hello there! I am a script."


def weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees"


TOOL = FunctionTool.from_defaults(weather)
MODELS = {
    "OpenAILike": OpenAILike(
        model=MODEL, api_base=f"{URL}/v1", api_key="unused", is_chat_model=True, is_function_calling_model=True
    ),
    "Ollama": Ollama(model=MODEL, base_url=URL, request_timeout=60, context_window=4096),
}
for name, model in MODELS.items():
    asked = [ChatMessage(role="user", content="Hi")]
    assert model.chat(asked).message.content == HELLO
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(asked)) == HELLO
    assert model.complete("Hi").text == HELLO
    print(f"{name}: chat, stream, complete")
    reply = model.chat_with_tools([TOOL], user_msg="What is the weather in Paris?")
    (call,) = model.get_tool_calls_from_response(reply)
    assert (call.tool_name, call.tool_kwargs) == ("weather", {"city": "Paris"})
    print(f"{name}: tools")
