"""What each model is asked, and what its answers are worth. No torch here: the parent process reads it too."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# SmolLM2's end of a turn, and the length of answer that is asked for: "The capital of France is Paris." has 8 tokens.
END_OF_TURN = 2
TARGET_TOKENS = 8
LONGEST_ANSWER = 24

QUESTIONS = (
    "What is the capital of France?",
    "What color is the sky?",
    "How many legs does a dog have?",
    "Name a fruit.",
    "What is 2 plus 3?",
    "Where do fish live?",
    "What do cows eat?",
    "What is the opposite of hot?",
)

ALPHABET = string.digits + string.ascii_letters + "+-"


class Text(Protocol):
    """Text to tokens and back."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@dataclass(frozen=True)
class Task:
    """One model's reinforcement learning task.

    ``answers`` are sampled for each prompt and form one group; an answer ends at the token ``end`` (None: never) or
    after ``limit`` tokens, and ``reward`` gives 0 to 1 for it.
    """

    title: str
    goal: str
    prompts: tuple[str, ...]
    answers: int
    limit: int
    end: int | None
    learning_rate: float
    steps: int
    reward: Callable[[Sequence[int]], float]
    text: Callable[[Path], Text]


def brevity(tokens: Sequence[int]) -> float:
    """1 for an answer of `TARGET_TOKENS` tokens that has ended, less for a longer or shorter one, 0 for an open end."""
    if tokens[-1] != END_OF_TURN:
        return 0.0
    return max(0.0, 1 - abs(len(tokens) - TARGET_TOKENS) / (LONGEST_ANSWER - TARGET_TOKENS))


def digits(tokens: Sequence[int]) -> float:
    """The share of tokens that are digits: 10 of the 64 tokens, so about 0.16 before training."""
    return sum(token < len(string.digits) for token in tokens) / len(tokens)


class ChatText:
    """SmolLM2's tokenizer; a prompt is wrapped as the user's turn of a chat."""

    def __init__(self, directory: Path) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(self, text: str) -> list[int]:
        turn = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return list(self._tokenizer.encode(turn).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))


class CharacterText:
    """One token a character of `ALPHABET`."""

    def __init__(self, directory: Path) -> None:
        del directory

    def encode(self, text: str) -> list[int]:
        return [ALPHABET.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(ALPHABET[token] for token in tokens)


TASKS = {
    "smollm2": Task(
        title="SmolLM2-135M-Instruct",
        goal=f"answer in {TARGET_TOKENS} tokens",
        prompts=tuple(f"{question} Answer in one short sentence." for question in QUESTIONS),
        answers=6,
        limit=LONGEST_ANSWER,
        end=END_OF_TURN,
        learning_rate=2e-5,
        steps=10,
        reward=brevity,
        text=ChatText,
    ),
    "tiny": Task(
        title="a random Llama of two layers",
        goal="write digits",
        prompts=("hello", "abc", "xyz", "QRS"),
        answers=16,
        limit=16,
        end=None,
        learning_rate=1e-2,
        steps=10,
        reward=digits,
        text=CharacterText,
    ),
}
