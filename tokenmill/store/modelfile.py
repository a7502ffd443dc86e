r'''Parser of Modelfiles, Ollama's description of a model that is made from another one.

    # comment
    FROM smollm2:135m                      a name, or a path to a GGUF file or model directory
    ADAPTER ./mario-lora                   a path to a PEFT folder or a GGUF file
    PARAMETER temperature 0.3              may occur many times; several `stop` form a list
    SYSTEM """You are Mario."""            text in """ … """ may have several lines; "…" and bare text are one line
    TEMPLATE """{% for m in messages %}…"""
    MESSAGE user Is Toronto in Canada?
    LICENSE """…"""

Instructions are case-insensitive; `FROM` is required, once. The type of a parameter follows from its text: number, true
or false, string. Templates are Jinja, as in the models themselves; Ollama's Go templates are refused.
'''

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tokenmill.errors import InvalidRequest
from tokenmill.store.layout import Customization
from tokenmill.store.names import shown

MAX_MODELFILE_CHARACTERS = 1 << 20
ROLES = ("system", "user", "assistant")
QUOTES = '"""'
LISTS = ("stop",)  # parameters that may be given several times
_GO_TEMPLATE = re.compile(
    r"\{\{-?\s*(\$|\.[A-Za-z]|(if|range|else|end|with|define|block|template|and|or|not|eq|len|slice|json)\b)"
)


@dataclass
class Modelfile:
    """The instructions of a Modelfile."""

    base: str = ""
    adapter: str = ""
    texts: dict[str, str] = field(default_factory=dict)  # system, template, license
    parameters: dict[str, Any] = field(default_factory=dict)
    messages: list[tuple[str, str]] = field(default_factory=list)

    @property
    def customization(self) -> Customization:
        return Customization(parameters=self.parameters, messages=self.messages, adapter=self.adapter, **self.texts)


def parse_modelfile(text: str) -> Modelfile:
    """Read a Modelfile; raise InvalidRequest with the line that is wrong."""
    if len(text) > MAX_MODELFILE_CHARACTERS:
        raise InvalidRequest(f"a Modelfile has at most {MAX_MODELFILE_CHARACTERS} characters")
    found = Modelfile()
    lines = text.splitlines()
    position = 0
    while position < len(lines):
        number, line = position + 1, lines[position].strip()
        position += 1
        if not line or line.startswith("#"):
            continue
        instruction, _, rest = line.partition(" ")
        if rest.count(QUOTES) == 1:  # the text continues on the following lines
            block, position = _block(lines, position, rest, number)
            rest = block
        _apply(found, instruction.lower(), rest.strip(), number)
    if not found.base:
        raise InvalidRequest("the Modelfile has no FROM", param="from", hint="name the model that it is made from")
    return found


def _block(lines: list[str], position: int, rest: str, number: int) -> tuple[str, int]:
    """Return the text up to the line with the closing quotes, quotes included, and the position after it."""
    block = [rest]
    while position < len(lines):
        block.append(lines[position])
        position += 1
        if QUOTES in block[-1]:
            return "\n".join(block), position
    raise InvalidRequest(f"line {number} of the Modelfile: the text that {QUOTES} opens is never closed")


def _apply(found: Modelfile, instruction: str, rest: str, number: int) -> None:
    if not rest:
        _refuse(number, f"{instruction.upper()[:20]} needs a value")
    match instruction:
        case "from":
            if found.base:
                _refuse(number, "there is a second FROM")
            found.base = _unquoted(rest)
        case "adapter":
            if found.adapter:
                _refuse(number, "there is a second ADAPTER; a model can have only one")
            found.adapter = _unquoted(rest)
        case "system" | "template" | "license":
            found.texts[instruction] = _unquoted(rest)
            if instruction == "template":
                require_jinja(found.texts["template"])
        case "parameter":
            _add_parameter(found, rest, number)
        case "message":
            role, _, content = rest.partition(" ")
            if role.lower() not in ROLES:
                _refuse(number, f"the role of a message must be one of {', '.join(ROLES)}, not {shown(role)}")
            found.messages.append((role.lower(), _unquoted(content.strip())))
        case _:
            _refuse(number, f"there is no instruction {shown(instruction.upper())}")


def _add_parameter(found: Modelfile, rest: str, number: int) -> None:
    name, _, text = rest.partition(" ")
    if not text.strip():
        _refuse(number, f"PARAMETER {name[:40]} needs a value")
    if name in LISTS:
        found.parameters.setdefault(name, []).append(_unquoted(text.strip()))
    else:
        found.parameters[name] = parameter_value(_unquoted(text.strip()))


def parameter_value(text: str) -> int | float | bool | str:
    """Convert a parameter's text to a boolean or a number if it looks like one."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _unquoted(text: str) -> str:
    for quotes in (QUOTES, '"'):
        if len(text) >= 2 * len(quotes) and text.startswith(quotes) and text.endswith(quotes):
            return text[len(quotes) : -len(quotes)]
    return text


def require_jinja(template: str) -> None:
    """Refuse a Go template, the format of Ollama's own models; chat templates must be Jinja."""
    if _GO_TEMPLATE.search(template) and "{%" not in template:
        raise InvalidRequest(
            "the template is one of Ollama's Go templates, which are not supported",
            param="template",
            hint="leave it out to use the model's own, or give a Jinja chat template",
        )


def _refuse(number: int, problem: str) -> NoReturn:
    raise InvalidRequest(f"line {number} of the Modelfile: {problem}")


def as_modelfile(base: str, custom: Customization) -> str:
    """Return the Modelfile that would make this created model."""
    lines = [f"FROM {base}", *([f"ADAPTER {custom.adapter}"] if custom.adapter else [])]
    for name, value in custom.parameters.items():
        values = value if isinstance(value, list) else [value]
        lines += [f"PARAMETER {name} {_written(one)}" for one in values]
    for name in ("system", "template", "license"):
        if text := getattr(custom, name):
            lines.append(f"{name.upper()} {QUOTES}{text}{QUOTES}")
    lines += [f"MESSAGE {role} {QUOTES}{content}{QUOTES}" for role, content in custom.messages]
    return "\n".join(lines) + "\n"


def _written(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
