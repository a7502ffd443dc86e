"""Guided decoding: answers that follow a JSON schema, a regex, a list of choices or a grammar.

vocabulary   the tokenizer in the form that the grammar engine (llguidance) needs schema       which JSON schemas and
regexes can be enforced; everything else is refused by keyword and path grammar      translation of every kind of
constraint into the grammar engine's one form compile      compilation in worker threads, and a cache bounded by bytes
matcher      the state of one sequence in its grammar: advance, roll back, fork, forced tokens masks        bit masks of
the tokens that may come next, computed while the model computes grammars     the grammars of an engine: waiting
requests, and the rows of each step

An answer ends in one of three ways. The grammar is complete and nothing may follow: finish reason "stop", and the text
is complete. A stop string or stop id is sampled, inside the grammar or not: "stop" with that reason, and the text ends
there. max_tokens is reached: "length", and the text is the beginning of a valid one.
"""
