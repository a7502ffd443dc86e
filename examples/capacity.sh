#!/bin/sh
# From a plan to a measurement: sh examples/capacity.sh http://127.0.0.1:8000
set -e
URL=${1:-http://127.0.0.1:8000}
LAG_MS=${2:-20} # bench serve reports nothing if its own event loop lagged by more than this

# What does the model need, and how fast would it be, on other devices?
tokenmill plan smollm2:135m --device H100 --compare L40S --input-len 512 --output-len 128

# What latency do two and four concurrent clients of this server see?
tokenmill bench serve --url "$URL" --concurrency 2 --num-requests 6 --input-len 32 --output-len 8 --max-lag-ms "$LAG_MS" --output two.json
tokenmill bench serve --url "$URL" --concurrency 4 --num-requests 12 --input-len 32 --output-len 8 --max-lag-ms "$LAG_MS" --output four.json
tokenmill bench report two.json four.json
