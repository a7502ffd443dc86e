"""openai-agents, which speaks Responses: text, a stream, a tool loop, a handoff, a typed answer, and chains and
conversations that the server keeps."""

import asyncio
import os

from agents import Agent, Runner, function_tool, set_default_openai_client, set_tracing_disabled
from openai import AsyncOpenAI
from pydantic import BaseModel

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]


class AgentCity(BaseModel):
    name: str
    population: int


@function_tool
def weather(city: str) -> str:
    """The weather of a city."""
    return "18 degrees" if city == "Paris" else "unknown"


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0)
    set_default_openai_client(client)
    hello = Agent(name="Greeter", model=MODEL, instructions="Be brief.")
    assert (await Runner.run(hello, "Hi")).final_output == "Hello there! I am a script."
    streamed = Runner.run_streamed(hello, "Hi")
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert streamed.final_output == "Hello there! I am a script."
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert streamed.context_wrapper.usage.output_tokens > 5
    print("text, stream, usage")
    asker = Agent(name="Asker", model=MODEL, tools=[weather])
    looped = await Runner.run(asker, "What is the weather in Paris?")
    assert "18 degrees" in looped.final_output
    print("tools")
    chained = await Runner.run(asker, "What is the weather in Paris?", auto_previous_response_id=True)
    assert "18 degrees" in chained.final_output and chained.last_response_id
    print("a chain that the server keeps")
    conversation = await client.conversations.create()
    kept = await Runner.run(asker, "What is the weather in Paris?", conversation_id=conversation.id)
    items = [item async for item in client.conversations.items.list(conversation.id, order="asc")]
    assert "18 degrees" in kept.final_output
    assert [item.type for item in items] == ["message", "function_call", "function_call_output", "message"]
    print("a conversation")
    typed = await Runner.run(Agent(name="Typist", model=MODEL, output_type=AgentCity), "Which city?")
    assert typed.final_output == AgentCity(name="Paris", population=2_100_000)
    print("typed answer")
    expert = Agent(name="Expert", model=MODEL, handoff_description="knows it all")
    handed = await Runner.run(Agent(name="Desk", model=MODEL, handoffs=[expert]), "Ask the expert")
    assert handed.last_agent.name == "Expert" and handed.final_output.startswith("It is 18 degrees")
    print("handoff")


asyncio.run(main())
