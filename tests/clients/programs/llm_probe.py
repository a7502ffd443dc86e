"""`llm`, the command: text, a schema and a tool, with the server as an extra model of its configuration file."""

import json
import os
import subprocess
import sys
from pathlib import Path

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
folder = Path(os.environ["LLM_USER_PATH"])
folder.mkdir(parents=True, exist_ok=True)
entry = {
    "model_id": "ours",
    "model_name": MODEL,
    "api_base": f"{URL}/v1",
    "supports_tools": True,
    "supports_schema": True,
}
(folder / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
(folder / "weather.py").write_text(
    'def weather(city: str) -> str:\n    "The weather of a city"\n    return "18 degrees"\n'
)


def llm(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "llm", "-m", "ours", "--key", "unused", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


assert llm("Hi") == llm("--no-stream", "Hi") == "Hello there! I am a script."
print("text, stream")
assert json.loads(llm("--schema", "name, population int", "Which city?"))["name"] == "Paris"
print("schema")
assert "18 degrees" in llm("--functions", str(folder / "weather.py"), "What is the weather in Paris?")
print("tools")
