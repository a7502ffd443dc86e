"""The HTTP server: every generation takes one path; each API dialect only translates to and from it.

    http_protocol ─► middleware ─► auth ─► routing ─► dialect: parse ─► generation ─► engine
      connection       id, log      key     body        body → job     job → events
    client ◄──────────────────────────────────────── dialect: render ◄──────┘

    app.py         the layers and the table of endpoints
    dialect.py     the parts of a protocol that the outer layers need: error bodies, status codes, key hint
    registry.py    finds a model by name
    gate.py        the handle of one model, whether it is in memory or not
    variants.py    model names that are served by another model's engine
    openai/        OpenAI's dialect: endpoints, parser, renderings, schemas
    run.py         the lifecycle of the process: bind, load, serve, drain

`generation.py` knows no dialect: it takes a `GenerationJob` (engine requests and a `Rendering`) and writes the reply.
"""
