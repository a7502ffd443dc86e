"""Inputs of a decode step, gathered on the device."""
