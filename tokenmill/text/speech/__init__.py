"""Formats of tool calls and thinking: rows of data, with a reader, a grammar and their detection."""

from tokenmill.text.speech.detect import call_format_names, detect_speech
from tokenmill.text.speech.reader import SpeechReader
from tokenmill.text.speech.speech import Speech, SpeechStart

__all__ = ["Speech", "SpeechReader", "SpeechStart", "call_format_names", "detect_speech"]
