"""Logs and metrics of a running Tokenmill. Neither contains the text of prompts or answers."""
