"""The one room that knows both halves: the scheduler's plans and the runner's arithmetic, text and tokens.

LLM, AsyncEngine      the two fronts (offline, serving)
intake, outlet        text → token ids, token ids → text
link, process, child  how a front reaches its core: a thread, or a process behind a unix socket
core, loop            one step as a sentence, and who calls it
facts, resolve        what is known of the machine; `auto` settings settled by it
model, draft, build   the model on its device, a second one that guesses; everything put together
"""
