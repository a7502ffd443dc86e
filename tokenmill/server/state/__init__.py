"""What a server remembers: responses, conversations, files and batches, in one SQLite file that outlives the process.

database.py    the file, its thread, transactions
schema.py      the tables, by version
rows.py        whose a row is, expiry, bounds
instance.py    which server process works on a row, and whether it still lives
responses.py   stored responses and conversations
"""
