"""Personal data in texts: found by kind, numbered, and nothing else touched."""

from __future__ import annotations

import random
import time

import pytest

from tokenmill.text.redaction import PIECE, Redactor, pieces

KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow+AAB\nKCAQ/EA==\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Write to anna.b+x@mail.example.org, or bob@x.io.", "Write to <EMAIL_1>, or <EMAIL_2>."),
        ("bob@x.io and again bob@x.io", "<EMAIL_1> and again <EMAIL_1>"),
        ("card 4111 1111 1111 1111 exp 12/27", "card <CARD_1> exp 12/27"),
        ("order 4111 1111 1111 1112 stays", "order 4111 1111 1111 1112 stays"),
        ("IBAN DE89 3704 0044 0532 0130 00!", "IBAN <IBAN_1>!"),
        ("call +49 (30) 901820-33 or 030/1234567", "call <PHONE_1> or <PHONE_2>"),
        ("host 192.168.10.7 and 2001:db8::ff00:42:8329", "host <IP_1> and <IP_2>"),
        ("version 1.2.3 of 12:30:45, 3.14159 and 1,000,000", "version 1.2.3 of 12:30:45, 3.14159 and 1,000,000"),
        ("in 2024 there were 12 of 350 (3.4 %)", "in 2024 there were 12 of 350 (3.4 %)"),
        ("key sk-proj-abcdefghij0123456789 here", "key <KEY_1> here"),
        ("jwt eyJhbGciOiJI.eyJzdWIiOiIxMjM0.SflKxwRJSMeKKF2QT4", "jwt <TOKEN_1>"),
        (f"this {KEY} is mine", "this <PRIVATE_KEY_1> is mine"),
    ],
)
def test_kinds(text: str, expected: str) -> None:
    assert Redactor().redact(text) == expected


def luhn(digits: str) -> str:
    doubled = [int(one) if place % 2 else sum(divmod(2 * int(one), 10)) for place, one in enumerate(digits[::-1])]
    return digits + str(-sum(doubled) % 10)


def iban(country: str, account: str) -> str:
    number = int("".join(str(int(sign, 36)) for sign in account + country + "00"))
    return f"{country}{98 - number % 97:02d}{account}"


def test_a_corpus_of_checked_numbers_is_found_whole() -> None:
    rng = random.Random(11)
    digits = lambda count: "".join(rng.choices("0123456789", k=count))  # noqa: E731
    made = []
    for _ in range(500):
        card = luhn("4" + digits(14))
        made.append(" ".join(card[place : place + 4] for place in range(0, 16, 4)) if rng.random() < 0.5 else card)
        made.append(iban("DE", digits(18)))
        made.append(f"{rng.choice(['anna', 'bob.c', 'd_e'])}{digits(3)}@{rng.choice(['mail.de', 'x.co.uk'])}")
        made.append(".".join(str(rng.randrange(256)) for _ in range(4)))
    words = ["the", "invoice", "of", "was", "paid,", "see", "page", "12", "and", "call"]
    text = "\n".join(f"{' '.join(rng.choices(words, k=4))} {value}, {rng.choice(words)}" for value in made)
    redacted = Redactor().redact(text)
    left = [value for value in made if value in redacted]
    assert len(made) == 2000 and not left, left[:5]
    assert redacted.count("invoice") == text.count("invoice")


@pytest.mark.parametrize("piece", ["-eyJ", "a@", "+1 ", "DE89 ", "-----BEGIN PRIVATE KEY-----", "1-", "a.", ":a"])
def test_time_grows_with_the_text_alone(piece: str) -> None:
    def least_s(num_characters: int) -> float:
        text = piece * (num_characters // len(piece))
        times = []
        for _ in range(3):
            began_s = time.process_time()
            Redactor().redact(text)
            times.append(time.process_time() - began_s)
        return min(times)

    assert least_s(160_000) < 100 * max(least_s(8_000), 0.002), "20 times the text; its square would be 400"


def test_pieces_are_the_text() -> None:
    rng = random.Random(3)
    text = "".join(rng.choice(["word ", "line\n", "x" * 50_000]) for _ in range(2000))[: 40 * PIECE]
    assert "".join(pieces(text)) == text and max(map(len, pieces(text))) <= PIECE
