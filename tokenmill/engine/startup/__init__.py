"""Optimisations of the start-up time, which rely on internals of torch, Triton or the operating system.

    core_prestart        the core process is started before the command line is parsed       run, chat, serve
    torch_import         torch's libraries are loaded in parallel with other work; torch is imported without its meta
                         kernels; the GPU's context is created meanwhile
    triton_start         Triton is prepared in threads, kernels are compiled by copies of this process
    versions             the versions of torch and Triton that these optimisations were tested with
    garbage_collection   no garbage collection from torch's import until the model is loaded; collector settings for
                         processes that serve streams
    spare_core           a pre-started core process for the next model of a server with several

`--fast-start/--no-fast-start` (setting `fast_start`) turns all of them on or off, except the collector settings. They
are on in the processes of the command line and in core processes, and off in a Python program that imports the library
or opens an `LLM`, unless it sets `fast_start=True`. An optimisation is used only with versions it was tested with; with
others the start takes the normal path and logs a debug line.
"""
