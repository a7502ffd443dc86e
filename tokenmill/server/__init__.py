"""HTTP in front of the engine: one native path, dialects as translations around it.

    request ─► reception ─► auth ─► route: limits, parse ─► Job ─► Run (engine) ─► Reply: render ─► client

`native.py` runs a Job without knowing any dialect; a dialect is a parser (body → Job) and a `Rendering`.
"""
