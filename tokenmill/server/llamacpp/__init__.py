"""The native dialect of llama.cpp's server."""
