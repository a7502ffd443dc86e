#!/bin/sh
# From a plan to a measurement: sh examples/capacity.sh http://127.0.0.1:8000
set -e
URL=${1:-http://127.0.0.1:8000}
LAG_MS=${2:-20} # a load generator that was later than this by itself makes no report

# What would the model need on other devices?
tokenmill plan smollm2:135m --device H100 --compare L40S --input-len 512 --output-len 128

# What do clients of this server see, with two and with four of them?
tokenmill bench serve --url "$URL" --concurrency 2 --num-requests 6 --input-len 32 --output-len 8 --max-lag-ms "$LAG_MS" --output two.json
tokenmill bench serve --url "$URL" --concurrency 4 --num-requests 12 --input-len 32 --output-len 8 --max-lag-ms "$LAG_MS" --output four.json
tokenmill bench report two.json four.json
