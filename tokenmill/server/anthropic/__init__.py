"""Anthropic's Messages API, as its SDKs and Claude Code speak it (API versions 2023-06-01 and 2026-10-21)."""
