"""A model's weights: found, checked, read under our own names, quantised and expanded."""
