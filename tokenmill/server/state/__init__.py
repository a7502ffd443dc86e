"""The persistent state of a server: responses, conversations, files and batches, in one SQLite file.

database.py    the file, its thread, transactions
schema.py      the tables, by version
rows.py        ownership and expiry of rows, and limits of tables
instance.py    the server process that works on a row, and whether it is still alive
responses.py   stored responses and conversations
files.py       stored files
server_state.py  the state of one server, and its services
"""
