"""What a server's /metrics says, by series."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families


def metric_values(text: str) -> dict[str, float]:
    """Values by name, with those of a series' labels behind it that tell its samples apart: `requests_total{stop}`. The
    model is left out: a test has one."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        one.name + "".join(f"{{{value}}}" for label, value in one.labels.items() if label != "model"): one.value
        for one in samples
    }
