"""Batches: files of requests that are processed in the background, behind interactive requests.

lines.py     a line of a batch's file, and the check of the whole file
answers.py   processes one line in the same way as a request over HTTP
table.py     batches and the results of their lines, in the state file
runner.py    the service that runs batches
width.py     the number of lines that run concurrently

The form in which clients see a batch depends on the dialect (openai/batches.py, anthropic/batches.py).
"""
