"""Parses a server's /metrics into values by series."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def metric_values(text: str) -> dict[str, float]:
    """Return values by name, followed by those labels that distinguish the series' samples: `requests_total{stop}`.
    The model label is left out, since a test has one model."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        one.name + "".join(f"{{{value}}}" for label, value in one.labels.items() if label != "model"): one.value
        for one in samples
    }
