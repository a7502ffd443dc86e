"""aider: a file edited as it was asked for, through OpenAI's and Ollama's routes."""

import os
import subprocess
import sys
from pathlib import Path

URL, MODEL = os.environ["SERVER_URL"], os.environ["SERVER_MODEL"]
QUIET = ["--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--no-show-release-notes"]
QUIET += ["--analytics-disable", "--no-pretty", "--no-fancy-input", "--map-tokens", "0", "--no-detect-urls"]
ROUTES = {
    "openai": {"OPENAI_API_BASE": f"{URL}/v1", "OPENAI_API_KEY": "unused"},
    "ollama_chat": {"OLLAMA_API_BASE": URL},
}
prices = Path.home() / ".aider" / "caches" / "model_prices_and_context_window.json"  # else it would be fetched
prices.parent.mkdir(parents=True)
prices.write_text('{"none": {}}')
for route, variables in ROUTES.items():
    file = Path(f"edited_by_{route}.py")
    file.write_text('print("Goodbye")\n')
    asked = ["--message", f"Make {file} greet the reader.", "--edit-format", "whole", str(file)]
    done = subprocess.run(
        [sys.executable, "-m", "aider", "--model", f"{route}/{MODEL}", *QUIET, *asked],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert file.read_text() == 'print("Hello")\n', done.stdout + done.stderr
    print(f"{route}: edit")
