"""Batches: files of requests that are answered when there is time.

lines.py     a line of a batch's file, and the check of all of them
answers.py   one line answered, on the same way as a request over HTTP
table.py     batches and what came of their lines, in the state file
runner.py    the service that answers batches, beside interactive requests
width.py     how many lines are under way at once

What a batch looks like to its client is the dialects' affair (openai/batches.py, anthropic/batches.py).
"""
