"""Tagged blocks in a response's text."""

import re


def blocks(text: str, tag: str) -> list[str]:
    """The contents of every closed `<tag>..</tag>`, in order, stripped.

    A block opens at the last opening tag before its closing tag, so an unclosed tag earlier in the text takes nothing.
    """
    name = re.escape(tag)
    found = re.findall(f"<{name}>((?:(?!<{name}>).)*?)</{name}>", text, re.DOTALL)
    return [content.strip() for content in found]


def without_blocks(text: str, tag: str) -> str:
    """The text less every closed `<tag>..</tag>`, for what an agent wrote apart from what it was shown."""
    name = re.escape(tag)
    return re.sub(f"<{name}>.*?</{name}>", "", text, flags=re.DOTALL)
