"""OpenAI's Responses API: /v1/responses and /v1/conversations.

parse.py  items.py  tools.py     a body ──► ChatRequest, and what the response object repeats of it
events.py                        the engine's events ──► the response's events and its object
generate.py                      one response from body to reply, stored or not
background.py                    responses that no client waits for
routes.py  conversations.py      the endpoints
"""
