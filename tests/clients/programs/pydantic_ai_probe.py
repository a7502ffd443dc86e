"""pydantic-ai: text, a stream, a tool loop and a typed answer through its OpenAI (chat and Responses), Ollama and
Anthropic models."""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]


class PydanticCity(BaseModel):
    name: str
    population: int


def weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees" if city == "Paris" else "unknown"


async def probe(name: str, model: object) -> None:
    hello = Agent(model)
    assert (await hello.run("Hi")).output == "Hello there! I am a script."
    async with hello.run_stream("Hi") as streamed:
        assert await streamed.get_output() == "Hello there! I am a script."
        assert streamed.usage.output_tokens > 5
    print(f"{name}: text, stream, usage")
    looped = await Agent(model, tools=[weather]).run("What is the weather in Paris?")
    assert "18 degrees" in looped.output
    print(f"{name}: tools")
    typed = await Agent(model, output_type=PydanticCity).run("Which city?")
    assert typed.output == PydanticCity(name="Paris", population=2_100_000)
    print(f"{name}: typed answer")


async def main() -> None:
    openai = OpenAIProvider(base_url=f"{URL}/v1", api_key="unused")
    await probe("openai", OpenAIChatModel(MODEL, provider=openai))
    await probe("responses", OpenAIResponsesModel(MODEL, provider=openai))
    await probe("ollama", OpenAIChatModel(MODEL, provider=OllamaProvider(base_url=f"{URL}/v1")))
    await probe("anthropic", AnthropicModel(MODEL, provider=AnthropicProvider(base_url=URL, api_key="unused")))


asyncio.run(main())
