"""Renders conversations with chat templates as transformers does.

Reads {"folder": …, "conversations": […], "special_tokens": {…}} from stdin. Writes one JSON document by template
and conversation: {"text": …}, or {"error": …} where the template raises an exception.
"""

import json
import sys
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template


def render(source, conversation, special_tokens):
    try:
        rendered, _ = render_jinja_template(
            conversations=[conversation["messages"]],
            tools=conversation.get("tools"),
            documents=None,
            chat_template=source,
            add_generation_prompt=conversation.get("add_generation_prompt", True),
            **{**special_tokens, **conversation.get("variables", {})},
        )
        return {"text": rendered[0]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    job = json.load(sys.stdin)
    rendered = {}
    for path in sorted(Path(job["folder"]).glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        rendered[path.stem] = [render(source, each, job["special_tokens"]) for each in job["conversations"]]
    json.dump(rendered, sys.stdout)


main()
