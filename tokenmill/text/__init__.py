"""Everything that handles text: tokenizers, GGUF vocabularies, chat templates, detokenization, stops. No torch."""
