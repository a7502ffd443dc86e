"""HTTP in front of the engine: one native path for every generation, dialects as translations around it.

    http_protocol ─► middleware ─► auth ─► routing ─► dialect: parse ─► generation ─► engine
      connection       id, log      key     body        body → job     job → events
    client ◄──────────────────────────────────────── dialect: render ◄──────┘

    app.py         the layers and the table of endpoints
    dialect.py     what the outer layers know of a protocol: error bodies, key headers
    registry.py    models by name
    gate.py        the way to one model, in memory or not
    variants.py    names that answer with another model
    openai/        OpenAI's dialect: endpoints, parser, renderings, schemas
    run.py         the life of the process: bind, load, serve, drain

Generation knows no dialect: a dialect gives it a `GenerationJob` (requests and a `Rendering`) and gets a reply.
"""
