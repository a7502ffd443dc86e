"""Start-up tricks: all that shorten a start by relying on internals of torch, Triton or the system.

    core_prestart        the core's process is started before the command line is read       run, chat, serve
    torch_import         torch's libraries are loaded beside other work; it is imported without its meta kernels; the
                         GPU's context is made meanwhile
    triton_start         Triton's own preparations run in threads, kernels are compiled by copies of this process
    versions             which versions of torch and Triton the tricks were tested with
    garbage_collection   nothing is collected from torch's import until the model is loaded; collector settings for
                         processes that serve streams

One switch, `--fast-start/--no-fast-start` (setting `fast_start`), turns all but the settings for streams off. It is on
in the processes of the command line and in a core's own process. A Python program that imports the library, or opens an
`LLM` in its own process, gets none of it unless it asks with `fast_start=True`. A trick runs only with versions that it
was tested with; with others the start takes the ordinary way, and a debug line says so.
"""
