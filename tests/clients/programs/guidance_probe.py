"""guidance: a chat program over OpenAI's API."""

import os

import guidance
from guidance import assistant, gen, user

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
state = guidance.models.OpenAI(MODEL, base_url=f"{URL}/v1", api_key="unused", echo=False)
with user():
    state += "Hi"
with assistant():
    state += gen("said", max_tokens=50)
assert state["said"] == "Hello there! I am a script.", state["said"]
print("gen")
