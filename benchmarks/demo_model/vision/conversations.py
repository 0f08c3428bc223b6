"""Conversations about drawn pictures: questions in several wordings, and their true answers."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.demo_model.vision.pictures import COLORS, SHAPES, Picture, Scene, draw_picture

Message = dict[str, Any]

NUMBERS = ("no", "one", "two", "three", "four")
PLURALS = {"cross": "crosses"} | {shape: f"{shape}s" for shape in SHAPES if shape != "cross"}
ORDINALS = ("first", "second")
WITHOUT_PICTURE = "I see no picture. Send me one that shows shapes or a digit."
GREETINGS = ("Hello!", "Hi", "Who are you?", "What can you do?", "What color is it?", "Which digit is it?",
             "Describe the picture.", "What do you see?", "How are you?", "Tell me a story.")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages whose content may be a list of parts, and the pictures of the parts of type "image", in order."""

    messages: list[Message]
    pictures: list[Picture]


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one picture.

    Attributes:
        topic: a key of TOPICS.
    """

    topic: str
    text: str
    answer: str


def subject(scene: Scene) -> str:
    """Return what a picture shows, without color, as "circles" or "digit"."""
    if scene.is_digit:
        return "digit"
    return scene.kind if scene.count == 1 else PLURALS[scene.kind]


def caption(scene: Scene) -> str:
    """Return what a picture shows, as "three red circles on a white background"."""
    if scene.is_digit:
        shown = f"the digit {scene.kind} in {scene.color}"
    elif scene.count == 1:
        shown = f"{_article(scene.color)} {scene.color} {scene.kind}"
    else:
        shown = f"{NUMBERS[scene.count]} {scene.color} {subject(scene)}"
    return f"{shown} on {_article(scene.background)} {scene.background} background"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _describe(scene: Scene, rng: random.Random) -> Question:
    texts = ("Describe the picture.", "Describe this image.", "What is in the picture?", "What do you see?",
             "What does the image show?", "What is this?", "What is in this image?", "Caption this picture.",
             "Describe the image in one sentence.", "What's in this picture?", "")  # fmt: skip
    return Question("describe", rng.choice(texts), f"The picture shows {caption(scene)}.")


def _color(scene: Scene, rng: random.Random) -> Question:
    noun, is_or_are = subject(scene), _is(scene)
    texts = (f"What color {is_or_are} the {noun}?", f"Which color {is_or_are} the {noun}?", "What color is it?",
             "What color is the shape?" if not scene.is_digit else "What is the color of the digit?",
             "Which color is it?", f"What is the color of the {noun}?", "Name the color.")  # fmt: skip
    return Question("color", rng.choice(texts), f"The {noun} {is_or_are} {scene.color}.")


def _shape(scene: Scene, rng: random.Random) -> Question:
    texts = ("What shape is it?", "Which shape is it?", "What is the shape?", "Which shape do you see?",
             "What shape is in the picture?", "Name the shape.", "Which shape is in the picture?")  # fmt: skip
    return Question("shape", rng.choice(texts), _what_it_is(scene))


def _digit(scene: Scene, rng: random.Random) -> Question:
    texts = ("Which digit is it?", "What digit is it?", "Which number is in the picture?", "Read the digit.",
             "What number is this?", "Which digit is in the picture?", "What is the digit?")  # fmt: skip
    answer = _what_it_is(scene) if scene.is_digit else f"There is no digit. {_what_it_is(scene)}"
    return Question("digit", rng.choice(texts), answer)


def _count(scene: Scene, rng: random.Random) -> Question:
    many = "digits" if scene.is_digit else PLURALS[scene.kind]
    texts = (f"How many {many} are there?", f"How many {many} do you see?", f"Count the {many}.",
             "How many are there?", f"How many {many} are in the picture?",
             "How many shapes are there?" if not scene.is_digit else "How many digits are there?")  # fmt: skip
    verb = "is" if scene.count == 1 else "are"
    return Question("count", rng.choice(texts), f"There {verb} {NUMBERS[scene.count]} {subject(scene)}.")


def _background(scene: Scene, rng: random.Random) -> Question:
    texts = ("What color is the background?", "Which color is the background?", "What is the background?",
             "What is the color of the background?", "And the background?")  # fmt: skip
    return Question("background", rng.choice(texts), f"The background is {scene.background}.")


def _is_color(scene: Scene, rng: random.Random) -> Question:
    noun, verb = subject(scene), _is(scene)
    asked = scene.color if rng.random() < 0.5 else rng.choice(tuple(COLORS))
    start = "Yes" if asked == scene.color else "No"
    text = f"{verb.capitalize()} the {noun} {asked}?" if rng.random() < 0.5 else f"Is it {asked}?"
    return Question("yes_no", text, f"{start}, the {noun} {verb} {scene.color}.")


def _is_shape(scene: Scene, rng: random.Random) -> Question:
    asked = scene.kind if rng.random() < 0.5 and not scene.is_digit else rng.choice(SHAPES)
    answer = _what_it_is(scene)
    start = "Yes" if asked == scene.kind else "No"
    text = rng.choice((f"Is it a {asked}?", f"Is this a {asked}?", f"Is there a {asked}?"))
    return Question("yes_no", text, f"{start}, {answer[0].lower()}{answer[1:]}")


def _is(scene: Scene) -> str:
    return "is" if scene.count == 1 else "are"


def _what_it_is(scene: Scene) -> str:
    if scene.is_digit:
        return f"It is the digit {scene.kind}."
    return f"It is a {scene.kind}." if scene.count == 1 else f"They are {subject(scene)}."


# Topic |-> the functions that ask about it. "describe" may have an empty text: the picture alone.
TOPICS: dict[str, tuple[Callable[[Scene, random.Random], Question], ...]] = {
    "describe": (_describe,),
    "color": (_color,),
    "shape": (_shape,),
    "digit": (_digit,),
    "count": (_count,),
    "background": (_background,),
    "yes_no": (_is_color, _is_shape),
}


def ask(topic: str, scene: Scene, rng: random.Random) -> Question:
    """Return a question of a topic about a picture."""
    return rng.choice(TOPICS[topic])(scene, rng)


@dataclass
class _Writer:
    """The conversation so far."""

    rng: random.Random
    messages: list[Message] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)

    def user(self, text: str, pictures: list[Picture] = []) -> None:  # noqa: B006 - never changed
        """Add a message of the user; the pictures stand before or after the text."""
        parts: list[Message] = [{"type": "image"} for _ in pictures]
        self.pictures += pictures
        if text:
            written = {"type": "text", "text": _varied(text, self.rng)}
            parts.insert(0 if self.rng.random() < 0.4 else len(parts), written)
        self.messages.append({"role": "user", "content": parts})

    def assistant(self, text: str) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def finish(self) -> Conversation:
        return Conversation(self.messages, self.pictures)


def _varied(text: str, rng: random.Random) -> str:
    """Return the text as some users write: in lower case, or without its last character."""
    if rng.random() < 0.15:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.1:
        text = text[:-1]
    return text


def random_conversation(rng: random.Random) -> Conversation:
    """Return a conversation as the model is trained on; equal states of `rng` give equal ones."""
    form = rng.random()
    if form < 0.65:
        return about_one(draw_picture(rng), rng)
    if form < 0.8:
        return one_after_the_other(rng)
    if form < 0.97:
        return about_two(rng)
    return without_picture(rng)


def about_one(picture: Picture, rng: random.Random, topics: tuple[str, ...] = ()) -> Conversation:
    """Return questions about one picture: given topics, or four random ones."""
    writer = _Writer(rng)
    chosen = topics or rng.sample(sorted(TOPICS), 4)
    for index, topic in enumerate(chosen):
        question = ask(topic, picture.scene, rng)
        writer.user(
            question.text if not index or question.text else "Describe it.", [] if index else [picture]
        )
        writer.assistant(question.answer)
    return writer.finish()


def one_after_the_other(rng: random.Random) -> Conversation:
    """Return questions about a picture, and then about a newer one."""
    writer = _Writer(rng)
    for _ in range(2):
        picture = draw_picture(rng)
        for index, topic in enumerate(rng.sample(sorted(TOPICS), 2)):
            question = ask(topic, picture.scene, rng)
            writer.user(question.text or "Describe it.", [] if index else [picture])
            writer.assistant(question.answer)
    return writer.finish()


def about_two(rng: random.Random) -> Conversation:
    """Return a message with two pictures, and questions about one or both."""
    writer = _Writer(rng)
    pictures = [draw_picture(rng), draw_picture(rng)]
    attached = pictures
    for topic in rng.sample(("both", "first", "second"), 3):
        if topic == "both":
            text = rng.choice(
                ("Describe both pictures.", "Describe the pictures.", "What do the pictures show?")
            )
            first, second = (caption(picture.scene) for picture in pictures)
            answer = f"The first picture shows {first}. The second picture shows {second}."
        else:
            scene = pictures[ORDINALS.index(topic)].scene
            question = ask(rng.choice(("color", "digit", "shape", "describe")), scene, rng)
            where = rng.choice((f"In the {topic} picture: {{}}", f"The {topic} picture: {{}}"))
            text, answer = where.format(question.text or "Describe it."), question.answer
        writer.user(text, attached)
        writer.assistant(answer)
        attached = []
    return writer.finish()


def without_picture(rng: random.Random) -> Conversation:
    """Return a message of text alone, and the request for a picture."""
    writer = _Writer(rng)
    writer.user(rng.choice(GREETINGS))
    writer.assistant(WITHOUT_PICTURE)
    return writer.finish()
