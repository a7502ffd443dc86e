"""Tool-call and reasoning formats: a table of data, with a reader, a grammar and detection derived from it."""

from tokenmill.text.speech.detect import call_format_names, detect_speech
from tokenmill.text.speech.reader import SpeechReader
from tokenmill.text.speech.speech import Speech, SpeechStart

__all__ = ["Speech", "SpeechReader", "SpeechStart", "call_format_names", "detect_speech"]
