"""litellm: text, a stream, a tool call and embeddings by its openai, hosted_vllm, ollama, ollama_chat and anthropic."""

import json
import os

import litellm

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
ASKED = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
litellm.telemetry = False
litellm.suppress_debug_info = True
PROVIDERS = {"openai": f"{URL}/v1", "hosted_vllm": f"{URL}/v1", "ollama_chat": URL, "anthropic": URL, "ollama": URL}

for provider, base in PROVIDERS.items():
    shared = {
        "model": f"{provider}/{MODEL}",
        "api_base": base,
        "api_key": "unused",
        "max_tokens": 100,
        "num_retries": 0,
    }
    whole = litellm.completion(messages=ASKED, **shared)
    assert whole.choices[0].message.content.strip() == "Hello there! I am a script.", whole
    assert whole.usage.prompt_tokens > 5 and whole.usage.completion_tokens > 5
    chunks = list(litellm.completion(messages=ASKED, stream=True, **shared))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text.strip() == "Hello there! I am a script.", text
    print(f"{provider}: text, stream, usage")
    if provider == "ollama":  # it writes tools into the prompt by itself
        continue
    called = litellm.completion(messages=[{"role": "user", "content": "Weather?"}], tools=[WEATHER], **shared)
    (call,) = called.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    print(f"{provider}: tools")
vectors = litellm.embedding(model=f"openai/{MODEL}", input=["a", "b"], api_base=f"{URL}/v1", api_key="unused")
assert len(vectors.data) == 2
vectors = litellm.embedding(model=f"ollama/{MODEL}", input=["a", "b"], api_base=URL)
assert len(vectors.data) == 2
print("openai, ollama: embeddings")
