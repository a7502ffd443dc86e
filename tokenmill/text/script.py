"""Scripts: the answers of a model without weights, for black-box tests of clients and of the whole serving stack.

    tokenmill serve scripted:FILE --chat-template T.jinja

A script is JSON: rules that choose an answer by the prompt, and the answers. `docs/scripted-model.md` describes it for
users. The rest of the engine is real: process, scheduler, sampler, grammars, tokenizer and chat template.

    prompt ids ──► TokenizedScript.answer_to ──► ScriptAnswer ──► AnswerCursor: the next token, given the sampled ones

An answer is compared with the sampled tokens as *atoms* (bytes and control tokens), not as token ids, because a grammar
that forces text may split it into other tokens than the tokenizer would. The sampled token may differ from the proposed
one (a mask, a bias). A plain script then proposes only the end token; a stubborn one keeps proposing the rest of its
text, so that a grammar has to force every token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from tokenmill.errors import InvalidConfig
from tokenmill.text.template import CHATML, ChatTemplate
from tokenmill.text.tokenizer import Tokenizer, byte_tokenizer

DEFAULT_CONTEXT = 131_072
MAX_DELAY_S = 60.0
HIDDEN_SIZE = 16  # width of the placeholder hidden states, and so of embeddings
FAIL = -1  # instead of a token id: the model returns NaN logits, so that the request fails
LOST = -1  # instead of a position: the sampled text differs from a plain script's answer


@dataclass(frozen=True)
class ScriptRule:
    """One answer and the prompts it is for; a rule without conditions matches every prompt."""

    say: tuple[str | dict[str, Any], ...]
    match: re.Pattern[str] | None = None  # searched for in the rendered prompt
    turn: int | None = None  # number of this answer in the conversation, from 1
    is_stubborn: bool = False
    repeats: bool = False  # repeats the answer instead of ending
    delay_s: float = 0.0  # before the first token
    token_delay_s: float = 0.0  # before every other one


@dataclass(frozen=True)
class Script:
    """The content of a script file."""

    rules: tuple[ScriptRule, ...]
    tokenizer_source: Path | None = None  # a model whose tokenizer is used; None: bytes and the tokens below
    control_tokens: tuple[str, ...] = ()
    added_tokens: tuple[str, ...] = ()  # single tokens that are part of the text, like Qwen's <tool_call>
    eos_token: str | None = None
    assistant_marker: str | None = None
    max_context: int = DEFAULT_CONTEXT

    def byte_tokenizer(self) -> Tokenizer:
        """Return a tokenizer of bytes and the script's own control tokens."""
        return byte_tokenizer(self.control_tokens, self.added_tokens, eos_token=self.eos_token)


# ── reading the file ───────────────────────────────────────────────────────────────────────────────────


def read_script(path: Path) -> Script:
    """Read a script. An error names the field that is wrong."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"the script {path} cannot be read: {error}", param="model") from None
    fields = ScriptFields({"answers": content} if isinstance(content, list) else content, f"the script {path.name}")
    source = fields.take("tokenizer", str, None)
    script = Script(
        rules=tuple(_rule(ScriptFields(one, f"{fields.where}: answers[{n}]")) for n, one in enumerate(fields.answers)),
        tokenizer_source=None if source is None else (path.parent / source).resolve(),
        control_tokens=fields.strings("control_tokens"),
        added_tokens=fields.strings("added_tokens"),
        eos_token=fields.take("eos", str, None),
        assistant_marker=fields.take("assistant_marker", str, None),
        max_context=fields.take("max_context", int, DEFAULT_CONTEXT),
    )
    fields.require_empty()
    if script.max_context < 1:
        fields.refuse("max_context must be at least 1")
    if script.tokenizer_source is not None and (script.control_tokens or script.added_tokens or script.eos_token):
        fields.refuse("control_tokens, added_tokens and eos can't be given together with a tokenizer")
    return script


class ScriptFields:
    """The fields of one object of a script. Each is taken once; a field left at the end is unknown."""

    def __init__(self, values: Any, where: str) -> None:
        self.where = where
        if not isinstance(values, dict):
            self.refuse(f"must be an object, got {str(values)[:40]!r}")
        self._left = dict(values)

    def refuse(self, problem: str) -> NoReturn:
        raise InvalidConfig(f"{self.where}: {problem}", param="model", hint="docs/scripted-model.md describes scripts")

    def take(self, name: str, kind: type[Any], default: Any) -> Any:
        value = self._left.pop(name, None)
        if value is None:
            return default
        kinds: tuple[type[Any], ...] = (int, float) if kind is float else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and kind not in (bool, object)):
            self.refuse(f"{name} must be of type {kind.__name__}, got {str(value)[:40]!r}")
        return value

    def strings(self, name: str) -> tuple[str, ...]:
        values = self.take(name, list, [])
        if not all(isinstance(value, str) and value for value in values):
            self.refuse(f"{name} must be a list of strings")
        return tuple(values)

    def seconds(self, name: str) -> float:
        value = float(self.take(name, float, 0.0))
        if not 0.0 <= value <= MAX_DELAY_S:
            self.refuse(f"{name} must be between 0 and {MAX_DELAY_S:g}")
        return value

    @property
    def answers(self) -> list[Any]:
        answers: list[Any] = self.take("answers", list, [])
        if not answers:
            self.refuse("answers must be a list of at least one answer")
        return answers

    def require_empty(self) -> None:
        if self._left:
            self.refuse(f"there is no field {next(iter(self._left))!r}")


def _rule(fields: ScriptFields) -> ScriptRule:
    say = fields.take("say", object, None)
    pieces = tuple(say) if isinstance(say, list) else (say,)
    if not pieces or not all(map(_is_piece, pieces)):
        fields.refuse('say must be a text, or a list of texts, {"plain": text}, {"ids": [id]} and {"fail": true}')
    pattern = fields.take("match", str, None)
    try:
        match = None if pattern is None else re.compile(pattern)
    except re.error as error:
        fields.refuse(f"match is not a regular expression: {error}")
    rule = ScriptRule(
        say=pieces,
        match=match,
        turn=fields.take("turn", int, None),
        is_stubborn=fields.take("stubborn", bool, False),
        repeats=fields.take("repeat", bool, False),
        delay_s=fields.seconds("delay_s"),
        token_delay_s=fields.seconds("token_delay_s"),
    )
    fields.require_empty()
    return rule


def _is_piece(piece: Any) -> bool:
    if isinstance(piece, str):
        return True
    match piece:
        case {"plain": str()} | {"fail": True}:
            return len(piece) == 1
        case {"ids": [*ids]}:
            return len(piece) == 1 and all(type(token_id) is int for token_id in ids)
    return False


# ── the answers as tokens ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class ScriptAnswer:
    """A tokenized answer: its atoms, and the token id that begins at each token's first atom."""

    rule: ScriptRule
    atoms: tuple[int, ...]
    token_at: dict[int, int]


class TokenizedScript:
    """A script with its answers tokenized."""

    def __init__(self, script: Script, tokenizer: Tokenizer, eos_token_id: int) -> None:
        self.tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self._script = script
        self._control = frozenset(tokenizer.added_tokens.values())
        self._answers = [self._answer(rule) for rule in script.rules]
        self._empty_answer = ScriptAnswer(ScriptRule(("",)), (), {})  # for a prompt that no rule matches

    def answer_to(self, prompt_ids: Sequence[int]) -> ScriptAnswer:
        """Return the first answer whose rule matches this prompt."""
        prompt = self.tokenizer.decode(prompt_ids, skip_special_tokens=False)
        return next((answer for answer in self._answers if self._matches(answer.rule, prompt)), self._empty_answer)

    def _matches(self, rule: ScriptRule, prompt: str) -> bool:
        if rule.turn is not None and rule.turn != prompt.count(self._marker):
            return False
        return rule.match is None or rule.match.search(prompt) is not None

    @cached_property
    def _marker(self) -> str:
        """The text that opens the assistant's turn."""
        if self._script.assistant_marker is not None:
            return self._script.assistant_marker
        template = ChatTemplate(self.tokenizer.chat_template or CHATML, self.tokenizer.special_tokens)
        question: list[dict[str, Any]] = [{"role": "user", "content": "x"}]
        with_marker, without = (template.render(question, add_generation_prompt=added) for added in (True, False))
        marker = with_marker.removeprefix(without).strip()
        if not marker or marker == with_marker.strip():
            raise InvalidConfig(
                "this chat template does not show where the assistant's turn begins, so turns can't be counted",
                param="model",
                hint="set assistant_marker in the script",
            )
        return marker

    def _answer(self, rule: ScriptRule) -> ScriptAnswer:
        ids = [token_id for piece in rule.say for token_id in self._ids_of(piece)]
        atoms: list[int] = []
        token_at = {}
        for token_id in ids:
            token_at[len(atoms)] = token_id
            atoms += self.atoms_of(token_id)
        return ScriptAnswer(rule, tuple(atoms), token_at)

    def _ids_of(self, piece: str | dict[str, Any]) -> list[int]:
        match piece:
            case {"plain": text}:
                return self._plain_ids(list(text.encode()))
            case {"ids": [*ids]}:
                self._require_known(ids)
                return ids
            case {"fail": _}:
                return [FAIL]
        return self.tokenizer.encode(str(piece), add_special_tokens=False)

    def _plain_ids(self, atoms: list[int]) -> list[int]:
        """Return tokens that spell these bytes, without using any added token."""
        ids = []
        while atoms:
            ids.append(self.token_for(atoms))
            atoms = atoms[max(1, len(self.tokenizer.token_bytes(ids[-1]))) :]
        return ids

    def _require_known(self, ids: list[int]) -> None:
        for token_id in ids:
            if not 0 <= token_id < self.tokenizer.vocab_size:
                raise InvalidConfig(f"the script has token {token_id}, which its tokenizer lacks", param="model")

    def atoms_of(self, token_id: int) -> list[int]:
        """Return the bytes of a token; a control token (or FAIL) is a single atom."""
        if token_id == FAIL:
            return [FAIL]
        return [256 + token_id] if token_id in self._control else list(self.tokenizer.token_bytes(token_id))

    def token_for(self, atoms: Sequence[int]) -> int:
        """Return the longest token that is a prefix of these atoms."""
        if atoms[0] == FAIL or atoms[0] >= 256:
            return atoms[0] if atoms[0] == FAIL else atoms[0] - 256
        for length in range(min(len(atoms), self._longest), 0, -1):
            if all(0 <= atom < 256 for atom in atoms[:length]):
                found = self._by_bytes.get(bytes(atoms[:length]))
                if found is not None:
                    return found
        return self.eos_token_id  # the vocabulary has no token for this byte

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        plain = (token_id for token_id in range(self.tokenizer.vocab_size) if token_id not in self._control)
        return {self.tokenizer.token_bytes(token_id): token_id for token_id in plain}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._by_bytes))


class AnswerCursor:
    """Tracks how far one sequence has followed its scripted answer, and proposes its next token."""

    def __init__(self, script: TokenizedScript, answer: ScriptAnswer) -> None:
        self.answer = answer
        self._script = script
        self._sampled: list[int] = []  # token ids
        self._positions = [0]  # in the answer's atoms, after each sampled token

    def note_sampled(self, index: int, token_ids: Sequence[int]) -> None:
        """Record sampled tokens, the first of which has this index in the answer."""
        for offset, token_id in enumerate(token_ids, start=index):
            if offset < len(self._sampled) and self._sampled[offset] == token_id:
                continue
            del self._sampled[offset:], self._positions[offset + 1 :]
            self._sampled.append(token_id)
            self._positions.append(self._after(self._positions[-1], token_id))

    def next_token(self, index: int) -> int:
        """Return the token that the script proposes at this index of the answer."""
        position, atoms = self._positions[index], self.answer.atoms
        if position == LOST or not atoms:
            return self._script.eos_token_id
        if position == len(atoms):
            if not self.answer.rule.repeats:
                return self._script.eos_token_id
            position = 0
        known = self.answer.token_at.get(position)
        return self._script.token_for(atoms[position:]) if known is None else known

    def _after(self, position: int, token_id: int) -> int:
        if position == LOST:
            return LOST
        atoms, sampled = self.answer.atoms, self._script.atoms_of(token_id)
        if self.answer.rule.repeats and position == len(atoms):
            position = 0
        if sampled and list(atoms[position : position + len(sampled)]) == sampled:
            return position + len(sampled)
        return position if self.answer.rule.is_stubborn else LOST
