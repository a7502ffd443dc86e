"""Answers that must follow a schema, a regex or a grammar: compile, match, mask.

vocabulary   our tokenizer as the grammar engine (llguidance) needs it
schema       what of a JSON schema can be enforced; everything else is refused by keyword and path
grammar      every kind of constraint into the grammar engine's one form
compile      worker threads and a cache bounded by bytes
matcher      where one sequence stands in its grammar: advance, roll back, fork, forced tokens
objections   forced tokens that a request will not have
masks        which tokens may come next, as bits, computed while the model computes
grammars     the rows of a step and their matchers: what the engine talks to

What ends an answer. The grammar is complete and nothing may follow: "stop", and the text is whole. A stop string or a
stop id is drawn, inside the grammar as anywhere else: "stop" with that reason, and the text is cut there. The last
allowed token: "length", and the text is the beginning of a valid one.
"""
