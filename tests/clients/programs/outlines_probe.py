"""Outlines: text and a typed answer through its OpenAI, vLLM-server and Ollama models."""

import os
from typing import Literal

import ollama
import openai
import outlines
from pydantic import BaseModel

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
HELLO = "Hello there! I am a script."


class OutlinesCity(BaseModel):
    name: str
    population: int


client = openai.OpenAI(base_url=f"{URL}/v1", api_key="unused")
MODELS = {
    "openai": outlines.from_openai(client, MODEL),
    "vllm": outlines.from_vllm(client, MODEL),
    "ollama": outlines.from_ollama(ollama.Client(host=URL), MODEL),
}
for name, model in MODELS.items():
    assert model("Hi") == HELLO
    assert OutlinesCity.model_validate_json(model("Which city?", OutlinesCity)).name == "Paris"
    assert "".join(model.stream("Hi")) == HELLO
    print(f"{name}: text, schema, stream")
assert MODELS["vllm"]("Well?", Literal["yes", "no"]) in ("yes", "no")
print("vllm: choice")
