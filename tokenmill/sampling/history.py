"""What a row remembers of its tokens, for the steps that look back; each part is kept only where its step is used.

Everything here is a pure function of the row's own tokens, prompt and output: a resumed row builds it anew from them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.sampling.counts import TokenCounts
from tokenmill.sampling.dry import Breakers, RepeatRuns
from tokenmill.sampling.ngrams import NgramIndex
from tokenmill.sampling.thinking import Thinking
from tokenmill.types import RowInit

LOOK_AT_TOKENS = ("watermark", "processors")  # steps that read the tokens themselves


@dataclass
class History:
    num_tokens: int  # of prompt and output
    prompt_len: int
    counts: TokenCounts | None = None  # penalties
    ngrams: NgramIndex | None = None  # no_repeat_ngram_size
    repeats: RepeatRuns | None = None  # DRY
    thinking: Thinking | None = None  # thinking_budget
    tokens: list[int] | None = None  # steps that read them

    def record(self, token: int) -> None:
        self.num_tokens += 1
        for part in (self.counts, self.ngrams, self.repeats, self.thinking):
            if part is not None:
                part.record(token)
        if self.tokens is not None:
            self.tokens.append(token)


def history_of(new_row: RowInit, steps: frozenset[str], vocab_size: int) -> History | None:
    """None where no step of the row looks back."""
    params, prompt, output = new_row.params, new_row.prompt_token_ids, new_row.output_token_ids
    history = History(num_tokens=len(prompt) + len(output), prompt_len=len(prompt))
    if "penalties" in steps:
        history.counts = TokenCounts(prompt, output, vocab_size)
    if "no_repeat_ngram" in steps:
        history.ngrams = NgramIndex(params.no_repeat_ngram_size, (*prompt, *output))
    if "dry" in steps:
        breakers = Breakers(new_row.tokenized.dry_break_ids, new_row.tokenized.dry_breakers)
        history.repeats = RepeatRuns((*prompt, *output), breakers)
    if "thinking" in steps:
        history.thinking = _thinking(new_row)
    if not steps.isdisjoint(LOOK_AT_TOKENS):
        history.tokens = [*prompt, *output]
    parts = (history.counts, history.ngrams, history.repeats, history.thinking, history.tokens)
    return history if any(part is not None for part in parts) else None


def _thinking(new_row: RowInit) -> Thinking:
    tokenized, budget = new_row.tokenized, new_row.params.thinking_budget
    assert budget is not None and tokenized.think_end_ids, "a budget comes with the markers' tokens"
    is_open = tokenized.starts_thinking
    thinking = Thinking(budget, tokenized.think_start_ids, tokenized.think_end_ids, is_open=is_open)
    for token in new_row.output_token_ids:
        thinking.record(token)
    return thinking
