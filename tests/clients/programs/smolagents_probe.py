"""smolagents: text, and an agent that calls a tool and then gives its answer."""

import os

from smolagents import OpenAIModel, ToolCallingAgent, tool

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]


@tool
def weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: Its name.
    """
    return "18 degrees"


model = OpenAIModel(model_id=MODEL, api_base=f"{URL}/v1", api_key="unused")
said = model.generate([{"role": "user", "content": [{"type": "text", "text": "Hi"}]}])
assert said.content == "Hello there! I am a script."
print("text")
agent = ToolCallingAgent(tools=[weather], model=model, max_steps=4, verbosity_level=0)
assert agent.run("What is the weather in Paris?") == "18 degrees"
print("agent")
