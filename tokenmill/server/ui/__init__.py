"""The page at `/`: chat, models and live load in a browser, and `/docs`. No build step, nothing from elsewhere.

assets/         what browsers get: two HTML files, ES modules, one style sheet
pages.py        serves those files: public, with an ETag and a content security policy
feed.py         `/ui/events` and `/ui/abort`: the load of the server while someone looks, and the end of a request
model_lists.py  `/ui/models`: what is served, stored and in the catalog, and whether it fits here

The files are public; all data comes from routes that need a key where the server has keys. The chat itself uses the
same routes as every other client.
"""
