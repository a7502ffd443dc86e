"""Several events of one choice as one: what waited together goes out together."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.types import Event


def merge_events(events: Sequence[Event]) -> Event:
    """All text, tokens and logprobs in their order; how it ended, and what it cost, as the last one says."""
    last = events[-1]
    if len(events) == 1:
        return last
    return msgspec.structs.replace(
        last,
        text="".join([event.text for event in events]),
        token_ids=[token_id for event in events for token_id in event.token_ids],
        logprobs=None if last.logprobs is None else [info for event in events for info in event.logprobs or []],
        prompt_logprobs=next((event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None),
        queue_s=next((event.queue_s for event in events if event.queue_s is not None), None),
    )
