"""The engine: joins scheduler and runner into a core, and the core to text in and text out.

LLM, AsyncEngine                  the two fronts: offline with the core in this process, serving with it in another
frontend                          the front's part of a model: spec, tokenizer, names
input_processor, output_processor text → token ids, token ids → events
core_client, core_process         the front's connection to its core: in a thread, or in a process behind unix sockets
messages, loop, core_main         the messages between front and core, the core's loop, the program of its process
core                              one engine step: plan, launch, collect, apply
backends, resolve                 the table of devices and kernels; choosing values for `auto` settings
model, speculation, build         the model on its device, draft tokens, assembling a core
startup                           optimisations of the start-up time, behind one switch
"""
