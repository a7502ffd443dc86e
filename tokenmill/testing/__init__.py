"""Scripted models for tests: tokens follow a rule, so that engine and server are tested without weights."""
