"""Haystack: text, a stream and a tool call through its OpenAI and Ollama generators."""

import os

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret
from haystack_integrations.components.generators.ollama import OllamaChatGenerator

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
HELLO = "Hello there! I am a script."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = Tool(name="weather", description="The weather", parameters=SCHEMA, function=lambda city: "18 degrees")
GENERATORS = {
    "OpenAI": OpenAIChatGenerator(model=MODEL, api_base_url=f"{URL}/v1", api_key=Secret.from_token("unused")),
    "Ollama": OllamaChatGenerator(model=MODEL, url=URL),
}
pieces: list[str] = []
for name, generator in GENERATORS.items():
    (reply,) = generator.run([ChatMessage.from_user("Hi")])["replies"]
    assert reply.text == HELLO
    pieces.clear()
    generator.run([ChatMessage.from_user("Hi")], streaming_callback=lambda chunk: pieces.append(chunk.content or ""))
    assert "".join(pieces) == HELLO
    print(f"{name}: text, stream")
    (reply,) = generator.run([ChatMessage.from_user("What is the weather in Paris?")], tools=[TOOL])["replies"]
    (call,) = reply.tool_calls
    assert (call.tool_name, call.arguments) == ("weather", {"city": "Paris"})
    print(f"{name}: tools")
