"""Ollama's dialect: /api/chat, /api/generate, /api/embed and the routes around models (/api/tags, show, pull, …).

options.py    Ollama's sampling options, into `SamplingParams`
parse.py      bodies into requests
render.py     replies as lines of JSON, errors
cards.py      what /api/tags, /api/show and /api/ps say of a model
routes.py     endpoints of generations and embeddings
library.py    endpoints that show and change the model store
"""
