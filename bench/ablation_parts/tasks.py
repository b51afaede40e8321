"""Three single-turn tasks with short answers: write a calculation, a shell command, or a function call.

Each task has eight kinds of questions, and some of the kinds have no example in the prompt. Changing a text,
a range or the order of the random draws changes the questions, so that earlier results cannot be repeated.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random

from tokenizers import Tokenizer

PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana", "Ivan", "Jo", "Kim", "Lena")
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "pens", "shells", "stamps", "stickers")
FILE_STEMS = ("report", "notes", "todo", "draft", "plan", "photo", "song", "budget", "letter", "index")
FILE_EXTENSIONS = ("txt", "md", "csv", "png", "log", "py")
FOLDERS = ("docs", "backup", "old", "src", "tmp", "music", "work", "mail")
CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Delhi", "Quito", "Bern")
CURRENCIES = ("dollars", "yen", "pesos")
MAX_CALCULATION_CHARACTERS = 40

QuestionMaker = Callable[[Random], tuple[str, str]]
"""Draws one question of a kind and returns it with its answer."""


@dataclass(frozen=True)
class Example:
    kind: int
    """The position of the question's kind in ``Task.kinds``."""
    question: str
    answer: str


@dataclass(frozen=True)
class Task:
    name: str
    instruction: str
    """The text of the system message."""
    demonstrations: tuple[tuple[str, str], ...]
    """The questions and answers that precede every question in the prompt."""
    kinds: tuple[QuestionMaker, ...]
    score: Callable[[str, str], float]
    """Takes a reply and the answer, and returns 1.0 if the reply is correct, else 0.0."""

    def make_examples(self, seed: int, *, is_held_out: bool) -> Iterator[Example]:
        """Yield examples without end. Held-out examples take the kinds in turn, the others at random."""
        rng = Random(f"{self.name}/{seed}/{is_held_out}")
        positions = range(len(self.kinds))
        for number in count():
            kind = number % len(positions) if is_held_out else rng.choice(positions)
            yield Example(kind, *self.kinds[kind](rng))


class ChatEncoder:
    """Converts between texts and the tokens of a model with the ChatML format."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.end_id = self._encode("<|im_end|>")[0]

    def encode_prefix(self, task: Task) -> list[int]:
        """Return the tokens of the instruction and the demonstrations."""
        text = f"<|im_start|>system\n{task.instruction}<|im_end|>\n"
        for question, answer in task.demonstrations:
            text += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        return self._encode(text)

    def encode_question(self, question: str) -> list[int]:
        return self._encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def score_calculation(text: str, answer: str) -> float:
    """Return 1.0 if the first line, up to an equals sign, is a calculation with this result."""
    text = text.split("\n")[0].split("=")[0]
    expression = text.strip()
    if not re.fullmatch(r"[\d\s+\-*/().]+", expression) or not re.search(r"[+\-*/]", expression):
        return 0.0
    # A power could take forever. Everything else that the characters above can express is cheap to evaluate.
    if len(text) > MAX_CALCULATION_CHARACTERS or "**" in expression:
        return 0.0
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            result = eval(expression, {"__builtins__": {}})
        return float(abs(result - int(answer)) < 1e-6)
    except (ArithmeticError, SyntaxError, TypeError):
        return 0.0


def score_exact_match(text: str, answer: str) -> float:
    return float(text.strip() == answer)


def _ask_distance(rng: Random) -> tuple[str, str]:
    speed, hours = rng.randint(21, 119), rng.randint(3, 19)
    return f"A train goes {speed} km per hour. How far does it go in {hours} hours?", str(speed * hours)


def _ask_change(rng: Random) -> tuple[str, str]:
    note, price = rng.randint(300, 999), rng.randint(20, 290)
    person = rng.choice(PEOPLE)
    question = f"{person} pays {price} cents with a note of {note} cents. How many cents come back?"
    return question, str(note - price)


def _ask_total(rng: Random) -> tuple[str, str]:
    a, b, c = (rng.randint(30, 300) for _ in range(3))
    thing = rng.choice(THINGS)
    return f"Three boxes hold {a}, {b} and {c} {thing}. How many is that in total?", str(a + b + c)


def _ask_minutes(rng: Random) -> tuple[str, str]:
    hours, minutes = rng.randint(2, 11), rng.randint(3, 57)
    question = f"A film lasts {hours} hours and {minutes} minutes. How many minutes is that?"
    return question, str(hours * 60 + minutes)


def _ask_fence(rng: Random) -> tuple[str, str]:
    length, width = rng.randint(12, 99), rng.randint(12, 99)
    question = f"A garden is {length} m long and {width} m wide. How long is the fence around it?"
    return question, str(2 * (length + width))


def _ask_seats(rng: Random) -> tuple[str, str]:
    rows, seats, broken = rng.randint(3, 19), rng.randint(12, 60), rng.randint(3, 40)
    question = f"A hall has {rows} rows of {seats} seats. {broken} seats are broken. How many can be used?"
    return question, str(rows * seats - broken)


def _ask_bags(rng: Random) -> tuple[str, str]:
    size, bags = rng.randint(3, 25), rng.randint(12, 80)
    person, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    return f"{person} packs {size * bags} {thing} into bags of {size}. How many bags are needed?", str(bags)


def _ask_half(rng: Random) -> tuple[str, str]:
    total, extra = rng.randint(20, 200) * 2, rng.randint(5, 90)
    person, thing = rng.choice(PEOPLE), rng.choice(THINGS)
    question = f"{person} had {total} {thing}, gave half away and then found {extra}. How many now?"
    return question, str(total // 2 + extra)


def _draw_file(rng: Random) -> str:
    return f"{rng.choice(FILE_STEMS)}{rng.randint(1, 99)}.{rng.choice(FILE_EXTENSIONS)}"


def _ask_mv(rng: Random) -> tuple[str, str]:
    file, folder = _draw_file(rng), rng.choice(FOLDERS)
    return f"move {file} to the folder {folder}", f"mv {file} {folder}/"


def _ask_rm(rng: Random) -> tuple[str, str]:
    file = _draw_file(rng)
    return f"delete the file {file}", f"rm {file}"


def _ask_cp(rng: Random) -> tuple[str, str]:
    source, target = _draw_file(rng), _draw_file(rng)
    return f"copy {source} to {target}", f"cp {source} {target}"


def _ask_mkdir(rng: Random) -> tuple[str, str]:
    folder = f"{rng.choice(FOLDERS)}{rng.randint(1, 99)}"
    return f"make a folder called {folder}", f"mkdir {folder}"


def _ask_head(rng: Random) -> tuple[str, str]:
    file, lines = _draw_file(rng), rng.randint(2, 60)
    return f"show the first {lines} lines of {file}", f"head -n {lines} {file}"


def _ask_grep(rng: Random) -> tuple[str, str]:
    file, word = _draw_file(rng), rng.choice(PEOPLE)
    return f"find the lines with {word} in {file}", f"grep {word} {file}"


def _ask_wc(rng: Random) -> tuple[str, str]:
    file = _draw_file(rng)
    return f"count the lines of {file}", f"wc -l {file}"


def _ask_sort(rng: Random) -> tuple[str, str]:
    source, target = _draw_file(rng), _draw_file(rng)
    return f"sort {source} and write the result to {target}", f"sort {source} > {target}"


def _ask_weather(rng: Random) -> tuple[str, str]:
    city, days = rng.choice(CITIES), rng.randint(1, 9)
    return f"What will the weather be in {city} in {days} days?", f"weather({city}, {days})"


def _ask_alarm(rng: Random) -> tuple[str, str]:
    hour, minute = rng.randint(1, 23), rng.randint(10, 59)
    return f"Wake me at {hour}:{minute}.", f"alarm({hour}, {minute})"


def _ask_send(rng: Random) -> tuple[str, str]:
    person, euros = rng.choice(PEOPLE), rng.randint(5, 900)
    return f"Send {euros} euros to {person}.", f"send({person}, {euros})"


def _ask_timer(rng: Random) -> tuple[str, str]:
    minutes = rng.randint(2, 90)
    return f"Start a timer of {minutes} minutes.", f"timer({minutes})"


def _ask_train(rng: Random) -> tuple[str, str]:
    start, end = rng.sample(CITIES, 2)
    return f"Book a train from {start} to {end}.", f"train({start}, {end})"


def _ask_light(rng: Random) -> tuple[str, str]:
    percent = rng.randint(2, 99)
    return f"Set the light to {percent} percent.", f"light({percent})"


def _ask_call(rng: Random) -> tuple[str, str]:
    person = rng.choice(PEOPLE)
    return f"Please ring {person} for me.", f"call({person})"


def _ask_convert(rng: Random) -> tuple[str, str]:
    euros, currency = rng.randint(5, 900), rng.choice(CURRENCIES)
    return f"How much are {euros} euros in {currency}?", f"convert({euros}, euros, {currency})"


CALC = Task(
    name="calc",
    instruction="Write the calculation.",
    demonstrations=(
        ("Tom picks 15 bags of 20 plums. How many plums is that?", "15 * 20"),
        ("Mia has 615 nuts and finds 278 more. How many nuts does she have?", "615 + 278"),
        ("Max has 350 cups and sells 129. How many cups are left?", "350 - 129"),
        ("Sam shares 96 nuts among 8 friends. How many does each get?", "96 / 8"),
        (
            "A box holds 12 pens and 7 are red. How many pens of other colours are in 9 boxes?",
            "(12 - 7) * 9",
        ),
    ),
    kinds=(
        _ask_distance,
        _ask_change,
        _ask_total,
        _ask_minutes,
        _ask_fence,
        _ask_seats,
        _ask_bags,
        _ask_half,
    ),
    score=score_calculation,
)
CMD = Task(
    name="cmd",
    instruction="Write the shell command.",
    demonstrations=(
        ("list the files", "ls"),
        ("move a1.txt to the folder home", "mv a1.txt home/"),
        ("show b2.md", "cat b2.md"),
        ("delete the file c3.csv", "rm c3.csv"),
        ("show the last 3 lines of d4.py", "tail -n 3 d4.py"),
    ),
    kinds=(_ask_mv, _ask_rm, _ask_cp, _ask_mkdir, _ask_head, _ask_grep, _ask_wc, _ask_sort),
    score=score_exact_match,
)
TOOLS = Task(
    name="tools",
    instruction=(
        "Answer with one call of a function: weather, alarm, send, timer, train, light, call, convert."
    ),
    demonstrations=(
        ("What will the weather be in Berlin in 2 days?", "weather(Berlin, 2)"),
        ("Wake me at 7:30.", "alarm(7, 30)"),
        ("Start a timer of 5 minutes.", "timer(5)"),
        ("Send 20 euros to Tom.", "send(Tom, 20)"),
        ("Book a train from Berlin to Madrid.", "train(Berlin, Madrid)"),
    ),
    kinds=(
        _ask_weather,
        _ask_alarm,
        _ask_send,
        _ask_timer,
        _ask_train,
        _ask_light,
        _ask_call,
        _ask_convert,
    ),
    score=score_exact_match,
)
TASKS = {task.name: task for task in (CALC, CMD, TOOLS)}
