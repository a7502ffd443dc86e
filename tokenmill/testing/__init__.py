"""Models for tests whose tokens follow a rule, so that engine and server can be tested without weights."""
