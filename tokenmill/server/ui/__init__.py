"""The web page at `/` (chat, models, live load) and `/docs`. It has no build step and no external resources.

assets/         the files for browsers: two HTML files, ES modules, one style sheet
pages.py        serves these files: public, with an ETag and a content security policy
feed.py         `/ui/events` and `/ui/abort`: the server's load as a stream, and aborting a request
model_lists.py  `/ui/models`: served, stored and catalogued models, and whether they fit this machine

The files are public; all data comes from routes that need an API key if the server has keys. The chat itself uses the
same routes as every other client.
"""
