"""OpenAI's Responses API: /v1/responses and /v1/conversations.

parse.py  items.py  tools.py     a body ──► ChatRequest, and the fields that the response object repeats
events.py                        the engine's events ──► the response's events and the response object
generate.py                      one response from body to reply, and its storage
background.py                    responses that run in the background
routes.py  conversations.py      the endpoints
"""
