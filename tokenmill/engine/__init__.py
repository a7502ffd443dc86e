"""The one room that knows both halves: the scheduler's plans and the runner's arithmetic, text and tokens.

LLM, AsyncEngine      the two fronts (offline, serving)
intake, outlet        text → token ids, token ids → text
link, process, child  how a front reaches its core: a thread, or a process behind a unix socket
core, loop            one step as a sentence, and who calls it
resolve, build        `auto` settings settled; everything put together
"""
