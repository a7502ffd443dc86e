"""The persistent state of a server: responses, conversations, files and batches, in one SQLite file.

database.py    the file, its thread, transactions
schema.py      the tables, by version
rows.py        whose a row is, expiry, bounds
instance.py    which server process works on a row, and whether it still lives
responses.py   stored responses and conversations
"""
