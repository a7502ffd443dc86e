#!/bin/sh
# Call the server's main routes with curl: sh examples/curl.sh http://127.0.0.1:8000
set -e
URL=${1:-http://127.0.0.1:8000}
post() { curl -sSf "$URL$1" -H 'Content-Type: application/json' -d "$2"; echo; }

curl -sSf "$URL/health"; echo
curl -sSf "$URL/v1/models"; echo
post /v1/chat/completions '{"model": "smollm2:135m", "temperature": 0, "max_tokens": 16,
  "messages": [{"role": "user", "content": "What is the capital of France?"}]}'
post /v1/completions '{"model": "smollm2:135m", "prompt": "1, 2, 3,", "max_tokens": 8, "temperature": 0, "logprobs": 1}'
post /v1/chat/completions '{"model": "smollm2:135m", "max_tokens": 32, "seed": 1, "stream": true,
  "messages": [{"role": "user", "content": "Say hello."}]}'
post /v1/chat/completions '{"model": "smollm2:135m", "guided_choice": ["yes", "no"],
  "messages": [{"role": "user", "content": "Is water wet?"}]}'
post /v1/embeddings '{"model": "smollm2:135m", "input": ["a cat"], "dimensions": 4}'
post /tokenize '{"prompt": "Hello there"}'
