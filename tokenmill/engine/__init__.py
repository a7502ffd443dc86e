"""The engine: puts scheduler and runner together, and text and tokens.

LLM, AsyncEngine                  the two fronts: offline in this process, serving with a core in another one
frontend                          what a front holds of a model: spec, tokenizer, names
input_processor, output_processor text → token ids, token ids → events
core_client, core_process         how a front reaches its core: in a thread, or in a process behind unix sockets
messages, loop, core_main         what they say to each other, the loop that serves it, the core's own program
core                              one step as a sentence
backends, resolve                 devices and kernels as rows; `auto` settings resolved by asking them
model, speculation, build         the model on its device, draft tokens; everything put together
startup                           what shortens a start, behind one switch
"""
