"""What can be seen of a running Tokenmill: log lines and metric series. Nothing here keeps the text of a prompt."""
