"""Measuring: the engine alone, a server under load, engines side by side; and saying how sure a figure is."""
