"""Ask about pictures with OpenAI's client. `python examples/describe_picture.py http://127.0.0.1:8000 [FILE ...]`.

The server has a model that reads images, such as the bundled one: `quire serve demo-vision`. Without files the
program draws two pictures.
"""

from __future__ import annotations

import base64
import io
import sys
from pathlib import Path

import openai
from PIL import Image, ImageDraw

Message = dict[str, object]


def draw_pictures() -> list[bytes]:
    """Return two drawn pictures as PNG files."""
    circle = Image.new("RGB", (640, 480), "white")
    ImageDraw.Draw(circle).ellipse((200, 120, 440, 360), fill="red")
    square = Image.new("RGB", (400, 400), "black")
    ImageDraw.Draw(square).rectangle((120, 100, 300, 280), fill="yellow")
    files = []
    for picture in (circle, square):
        file = io.BytesIO()
        picture.save(file, "PNG")
        files.append(file.getvalue())
    return files


def image_part(content: bytes) -> Message:
    """Return an image as a part of a message. The server recognizes the format by the content."""
    url = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def main() -> None:
    if len(sys.argv) < 2:
        sys.exit("usage: python examples/describe_picture.py URL [FILE ...]")
    pictures = [Path(name).read_bytes() for name in sys.argv[2:]] or draw_pictures()
    client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
    model = client.models.list().data[0].id
    for picture in pictures:
        messages: list[Message] = []
        for question in ("Describe the picture.", "What color is the background?"):
            text: Message = {"type": "text", "text": question}
            parts = [text] if messages else [image_part(picture), text]  # one image, several questions
            messages.append({"role": "user", "content": parts})
            answer = client.chat.completions.create(model=model, messages=messages, max_tokens=40)  # type: ignore[arg-type]
            reply = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": reply})
            print(f"{question} {reply}")


if __name__ == "__main__":
    main()
