"""Guided decoding: answers that follow a JSON schema, a regex, a list of choices or a grammar.

    vocabulary   the tokenizer in the form that the grammar engine (llguidance) needs
    schema       checks which JSON schemas and regexes can be enforced; refuses others by keyword and path
    grammar      translates every kind of constraint into the grammar engine's format
    json_escape  rewrites a Lark grammar for text inside a JSON string
    compile      compiles grammars in worker threads, with a cache bounded by bytes
    matcher      the state of one sequence in its grammar: advance, fork, forced tokens
    masks        bit masks of the allowed next tokens, computed while the model computes
    grammars     the grammars of an engine: waiting requests, and the rows of each step

An answer ends in one of three ways. The grammar is complete and nothing may follow: finish reason "stop", and the text
is complete. A stop string or stop id is sampled, inside the grammar or not: "stop" with that reason, and the text ends
there. max_tokens is reached: "length", and the text is the beginning of a valid one.
"""
