"""Chat templates: real ones against transformers' renderer, and hostile ones against the bounds."""

from __future__ import annotations

import time
from copy import deepcopy
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tests.support.timing import SOON_S
from tokenmill.errors import InvalidRequest, ModelError
from tokenmill.text.template import CHATML, ChatTemplate, messages_for_template, up_to_last
from tokenmill.text.template_sandbox import Bounds
from tokenmill.types import Message, ToolCall

TEMPLATES = sorted(
    path.stem for path in (Path(__file__).resolve().parents[2].parent / "shared" / "templates").glob("*")
)
NAMES = {"bos_token": "<BOS>", "eos_token": "<EOS>", "unk_token": "<UNK>", "pad_token": "<PAD>"}
NAMES |= {"functions": "[]", "datetime": "2024-01-02"}  # what firefunction wants beside the conversation

USER = Message(role="user", content='What\'s the weather in Paris?\n<b>&amp; "München"</b>')
ANSWER = Message(role="assistant", content="Sunny.")
CALL = ToolCall(id="call00001", name="weather", arguments='{"city": "Zürich", "n": 2}')
CONVERSATIONS = {
    "user": [USER],
    "turns": [USER, ANSWER, Message(role="user", content=" And tomorrow? ")],
    "turns with tools": [USER, ANSWER, USER],
    "system": [Message(role="system", content="Be brief."), USER],
    "reasoning": [USER, Message(role="assistant", content="Sun.", reasoning="Look up."), USER],
    "tools": [
        USER,
        Message(role="assistant", content=None, tool_calls=[CALL]),
        Message(role="tool", content='{"sky": "blue"}', name="weather", tool_call_id="call00001"),
    ],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells <the> weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "where"}},
            "required": ["city"],
        },
    },
}


def theirs(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    texts, _ = render_jinja_template([messages], tools=tools, chat_template=source, add_generation_prompt=True, **NAMES)
    text: str = texts[0]
    return text


def as_others_want_it(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """As given, with the arguments of a call as text, with "" for no content, with both."""
    found, written = [], '{"city": "Zürich", "n": 2}'
    for content, arguments in ((None, None), (None, written), ("", None), ("", written)):
        copy = deepcopy(messages)
        for message in copy:
            message["content"] = content if message["content"] is None else message["content"]
            for call in message.get("tool_calls", ()):
                call["function"]["arguments"] = arguments or call["function"]["arguments"]
        found.append(copy)
    return found


def expected_of(source: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    """Theirs; by another rendition of a tool call's turn where the first makes the template fail or print None."""
    faults: list[Exception] = []
    for one in as_others_want_it(messages):
        try:
            text = theirs(source, one, tools)
        except (jinja2.TemplateError, TypeError) as fault:
            faults.append(fault)
        else:
            if "None" not in text:
                return text
    raise faults[0]


@pytest.mark.parametrize("name", TEMPLATES)
def test_real_template_renders_as_transformers_does(shared_dir: Path, name: str) -> None:
    source = (shared_dir / "templates" / f"{name}.jinja").read_text()
    template = ChatTemplate(source, NAMES)
    num_equal = 0
    for kind, conversation in CONVERSATIONS.items():
        messages = messages_for_template(conversation)
        tools = [TOOL] if "tools" in kind else None
        try:
            expected = expected_of(source, messages, tools)
        except (jinja2.TemplateError, TypeError) as refused:
            if "of 'list' object is unsafe" in str(refused):  # a list of the template's own, which it may change here
                assert '{"city": "Zürich", "n": 2}' in template.render(messages, tools=tools)
                continue
            with pytest.raises((InvalidRequest, ModelError)) as caught:
                template.render(messages, tools=tools)
            assert str(refused) in str(caught.value)
            continue
        assert template.render(messages, tools=tools) == expected, kind
        num_equal += 1
    assert num_equal >= 2  # templates made for tools refuse to do without, others refuse a system turn


def test_a_template_changes_its_own_lists_only() -> None:
    own = "{% set found = [] %}{% set _ = found.append(1) %}{% set _ = found.append(2) %}{{ found.pop(0) }}{{ found }}"
    assert ChatTemplate(own, {}).render([]) == "1[2]"
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    for given in ("messages", "messages[0]['content']"):
        for change in ("append(1)", "pop()"):
            with pytest.raises((InvalidRequest, ModelError), match="is unsafe"):
                ChatTemplate(f"{{% if messages %}}{{{{ {given}.{change} }}}}{{% endif %}}", {}).render([message])
    assert message == {"role": "user", "content": [{"type": "text", "text": "hi"}]}


def test_all_templates_are_there(shared_dir: Path) -> None:
    assert len(TEMPLATES) == 68


def test_chatml() -> None:
    text = ChatTemplate(CHATML, {}).render([{"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(CHATML, {}).render([], add_generation_prompt=False) == ""


def test_template_arguments_reach_the_template_and_may_not_shadow_it() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}{{ messages|length }}", {"bos_token": "<s>"})
    assert template.render([{"role": "user"}], extra={"mood": "calm"}) == "<s>calm1"
    with pytest.raises(InvalidRequest, match="documents"):
        template.render([], extra={"documents": []})


def test_messages_for_template() -> None:
    broken = ToolCall(id="c", name="f", arguments="{not json")
    first, second = messages_for_template(
        [
            Message(role="assistant", tool_calls=[CALL, broken], reasoning="hm"),
            Message(role="tool", content="x", tool_call_id="c", name="f"),
        ]
    )
    assert first["content"] is None and first["reasoning_content"] == "hm"
    assert first["tool_calls"][0]["function"]["arguments"] == {"city": "Zürich", "n": 2}
    assert first["tool_calls"][1]["function"]["arguments"] == "{not json"
    assert second == {"role": "tool", "content": "x", "name": "f", "tool_call_id": "c"}
    assert "tool_calls" not in second and "name" not in first


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ messages[0].content }}|", "|"),
        ("{{ 'x' + messages[0].content }}", "x"),
        ("{% if messages[0].content is none %}call{% endif %}", "call"),
        ("{{ '<' + messages[0].tool_calls[0].function.arguments + '>' }}", '<{"city": "Zürich", "n": 2}>'),
        ("{{ messages[0].content + messages[0].tool_calls[0].function.arguments }}", '{"city": "Zürich", "n": 2}'),
        ("{{ messages[0].tool_calls[0].function.arguments.city }}: None", "Zürich: None"),
    ],
)
def test_a_turn_that_only_calls_tools_is_rendered_as_the_template_wants_it(source: str, text: str) -> None:
    messages = messages_for_template([Message(role="assistant", tool_calls=[CALL])])
    assert ChatTemplate(source, {}).render(messages) == text


LATE_SYSTEM = [Message(role="user", content="a"), Message(role="system", content="Now rhyme."), ANSWER, USER]
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('too late') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (CHATML, "<|im_start|>user\na<|im_end|>\n<|im_start|>system\nNow rhyme.<|im_end|>\n"),
        (FIRST_ONLY, "[system]Now rhyme.[user]a[assistant]Sunny."),
        (FIRST_ONLY.replace("{{ raise_exception('too late') }}", "{% continue %}"), "[system]Now rhyme.[user]a"),
    ],
    ids=["shown in place", "refused elsewhere", "ignored elsewhere"],
)
def test_a_late_system_message_is_always_shown(source: str, text: str) -> None:
    assert ChatTemplate(source, NAMES).render(messages_for_template(LATE_SYSTEM)).startswith(text)


def test_a_late_system_message_is_shown_by_every_template_that_shows_a_first_one(shared_dir: Path) -> None:
    num_shown = 0
    for name in TEMPLATES[::3]:
        template = ChatTemplate(next((shared_dir / "templates").glob(f"{name}.*")).read_text(), NAMES)
        try:
            first = template.render(messages_for_template([Message(role="system", content="Now rhyme."), USER]))
        except (InvalidRequest, ModelError):
            continue
        if "Now rhyme." in first:
            num_shown += 1
            assert "Now rhyme." in template.render(messages_for_template(LATE_SYSTEM)), name
    assert num_shown > 15


def test_what_was_begun_ends_the_prompt(shared_dir: Path) -> None:
    """With every third template, unless it shows an answer in other words than its own."""
    begun = [USER, Message(role="assistant", content="The best answer is (")]
    num_shown = 0
    for name in TEMPLATES[1::3]:
        template = ChatTemplate(next((shared_dir / "templates").glob(f"{name}.*")).read_text(), NAMES)
        try:
            text = template.render(messages_for_template(begun), add_generation_prompt=False)
        except (InvalidRequest, ModelError):
            continue
        num_shown += 1
        assert up_to_last(text, begun[-1]).endswith("The best answer is ("), name
    assert num_shown > 15
    with pytest.raises(InvalidRequest, match="can be continued"):
        up_to_last("…", begun[-1])
    with pytest.raises(InvalidRequest, match="can be continued"):
        up_to_last(str(USER.content), USER)


def test_generation_mark_and_loop_controls() -> None:
    source = (
        "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    )
    assert ChatTemplate(source, {}).render([]) == "013"
    assert ChatTemplate("a{% generation %}b{{ 1 ~ 2 }}{% endgeneration %}c", {}).render([]) == "ab12c"


def test_blame() -> None:
    refusing = ChatTemplate("{{ raise_exception('only one turn') }}", {})
    with pytest.raises(InvalidRequest, match="only one turn"):
        refusing.render([])
    with pytest.raises(InvalidRequest, match="can't render these messages"):
        ChatTemplate("{{ 'x' + messages[0].content }}", {}).render([{"role": "user", "content": 5}])
    with pytest.raises(ModelError, match="broken: UndefinedError"):
        ChatTemplate("{{ no_such_function() }}", {}).render([{"role": "user", "content": "x"}])
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("a\n{% if %}", {})
    with pytest.raises(ModelError, match="no_such_filter"):
        ChatTemplate("{{ 1|no_such_filter }}", {})
    with pytest.raises(ModelError, match="characters"):
        ChatTemplate("x" * (1 << 21), {})


SHARED_LISTS = "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}"
MUCH_TEXT = "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}"
HOSTILE = {
    "endless loop": "{% for i in range(10**9) %}{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursive macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "deep recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "string times number": "{{ 'a' * 10**9 }}",
    "list times number": "{{ ([0] * 10**9)|length }}",
    "large power": "{{ 9 ** 99999999 }}",
    "doubling +": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling ~": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling join": "{% set n = namespace(x='a') %}{% for i in range(60) %}{%set n.x = [n.x, n.x]|join %}{% endfor %}",
    "shared lists": SHARED_LISTS + "{{ n.x }}",
    "shared lists as json": SHARED_LISTS + "{{ n.x|tojson }}",
    "shared lists joined": SHARED_LISTS + "{{ n.x ~ 1 }}",
    "replace": "{{ ('a' * 99999)|replace('a', 'b' * 99999) }}",
    "replace method": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join method": "{{ ('b' * 99999).join(['a'] * 99999) }}",
    "center": "{{ 'a'|center(10**9) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format filter": "{{ '%*d'|format(10**9, 1) }}",
    "json indent": "{{ [1, 2]|tojson(indent=10**9) }}",
    "batch": "{% for row in [1]|batch(10**9, 0) %}{% endfor %}",
    "slices": "{% for row in [1]|slice(10**9) %}{% endfor %}",
    "much text": MUCH_TEXT,
    "much text in a macro": "{% macro m() %}" + MUCH_TEXT + "{% endmacro %}{{ m() }}",
    "much fixed text": "{% macro m() %}{% for i in range(99999) %}"
    + "a" * 9999
    + "{% endfor %}{% endmacro %}{{ m() }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "change messages": "{{ messages.append(1) }}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_template_is_stopped_in_time(name: str) -> None:
    begun = time.monotonic()
    with pytest.raises((ModelError, InvalidRequest)):
        ChatTemplate(HOSTILE[name], {}, Bounds(max_chars=1 << 20, max_s=0.3)).render(
            [{"role": "user", "content": "hi"}]
        )
    assert time.monotonic() - begun < SOON_S


def test_ordinary_templates_stay_within_bounds() -> None:
    long = [{"role": "user", "content": "word " * 200}] * 500
    text = ChatTemplate(CHATML, {}).render(long)
    assert text.count("word") == 100_000


DOUBLED = (
    "{% set n = namespace(x=[1], y=[1]) %}"
    "{% for i in range(26) %}{% set n.x = [n.x, n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}"
)


@pytest.mark.parametrize(
    "use",
    [
        *("{{ n.x == n.y }}", "{{ n.x in [n.y] }}", "{{ n.x < n.y }}", "{{ n.x|upper|length }}", "{{ n.x|pprint }}"),
        *("{{ [n.x, n.y]|sort|length }}", "{{ [n.x, n.y]|max }}", "{{ n.x|wordcount }}", "{{ n.x|title|length }}"),
    ],
)
def test_values_that_share_references_explode_nowhere(use: str) -> None:
    began = time.process_time()
    with pytest.raises(ModelError, match="stopped"):
        ChatTemplate(DOUBLED + use, {}).render([{"role": "user", "content": "x"}])
    assert time.process_time() - began < 2.0


def test_ordinary_comparisons_stay_what_they_are() -> None:
    source = (
        "{{ messages == other }},{{ messages|sort(attribute='role')|length }},{{ [3, 1]|max }},{{ ['b', 'a']|sort }}"
    )
    messages = [{"role": "user", "content": "x" * 500_000}]
    assert ChatTemplate(source, {}).render(messages, extra={"other": messages}) == "True,1,3,['a', 'b']"
