"""Anthropic's Messages API, as used by its SDKs and Claude Code (API versions 2023-06-01 and 2026-10-21)."""
