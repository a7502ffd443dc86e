"""Ollama's dialect: /api/chat, /api/generate, /api/embed and the model endpoints (/api/tags, show, pull, …).

options.py      Ollama's sampling options, parsed into `SamplingParams`
parse.py        bodies, parsed into engine requests
render.py       replies as lines of JSON, errors
cards.py        descriptions of models for /api/tags, /api/show and /api/ps
routes.py       endpoints of generations and embeddings
library.py      endpoints that list models and change the model store
store_work.py   pulls and creations, with their progress
"""
