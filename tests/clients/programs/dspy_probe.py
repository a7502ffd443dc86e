"""DSPy: a signature answered through its OpenAI and Ollama providers, both of which speak chat completions."""

import os

import dspy

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
for name, base in (("openai", f"{URL}/v1"), ("ollama_chat", f"{URL}/v1")):
    model = dspy.LM(f"{name}/{MODEL}", api_base=base, api_key="unused", cache=False, num_retries=0)
    with dspy.context(lm=model):
        assert dspy.Predict("question -> answer")(question="Capital of France?").answer == "Paris"
    print(f"{name}: Predict")
