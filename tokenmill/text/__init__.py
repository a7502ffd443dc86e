"""Between text and token ids: tokenizers, GGUF vocabularies, chat templates, the detokeniser, stops. No torch."""
