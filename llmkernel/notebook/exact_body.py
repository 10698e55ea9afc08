"""The body of a cell magic as it was typed: IPython takes `>>> ` and `In [1]: ` from its lines, a prompt keeps them."""

__all__ = ["exact_body"]


def exact_body(raw: str, magic: str, body: str) -> str:
    """What stands below `%%magic` in the cell `raw`, if `body` is what IPython made of it; else `body`.

    The newline with which IPython ends every cell is left out.
    """
    given = body.removesuffix("\n").split("\n")
    lines = raw.removesuffix("\n").split("\n")
    for number in range(len(lines) - 1, -1, -1):
        typed = lines[number + 1 :]
        if not lines[number].lstrip().startswith(f"%%{magic}") or len(typed) != len(given):
            continue
        if all(line.endswith(kept) for line, kept in zip(typed, given, strict=True)):
            return "\n".join(typed)
    return "\n".join(given)
