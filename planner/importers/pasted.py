"""Text as people paste it -> the file it was: code fences, cell magics, prompts, encodings, line ends."""

import re

_FENCE = re.compile(r"^[ \t]*(`{3,}|~{3,})[ \t]*([\w.+-]*)[^\n`]*$", re.MULTILINE)
_CELL = re.compile(r"\A\s*%%(?:writefile(?:[ \t]+-a)?[ \t]+(?P<file>\S+)|(?P<magic>\w+))[^\n]*\n")
_PROMPT = re.compile(
    r"^(?:\([\w.-]+\)[ \t]*)?(?:[\w.-]+@[\w.-]+:[^\n$#]{0,80})?(?:\$|>>>|\.\.\.|In \[\d+\]:) ?"
)
_HEREDOC = re.compile(
    r"cat\s*(?:>\s*(?P<before>\S+)\s*)?<<-?\s*(['\"]?)(?P<end>\w+)\2\s*(?:>\s*(?P<after>\S+)\s*)?\n"
    r"(?P<body>.*?)\n\s*(?P=end)[ \t]*(?:\n|\Z)",
    re.DOTALL,
)
MAX_PROMPTED = 20_000


def decode(data: bytes) -> str:
    """Return a file's text: UTF-8, UTF-16 with or without its mark, Windows line ends as plain ones."""
    for mark, name in (
        (b"\xef\xbb\xbf", "utf-8"),
        (b"\xff\xfe", "utf-16-le"),
        (b"\xfe\xff", "utf-16-be"),
    ):
        if data.startswith(mark):
            return plain_lines(data[len(mark) :].decode(name, errors="replace"))
    head = data[:400]
    if len(head) >= 4 and head[1::2].count(0) > len(head) // 4:
        return plain_lines(data.decode("utf-16-le", errors="replace"))
    if len(head) >= 4 and head[0::2].count(0) > len(head) // 4:
        return plain_lines(data.decode("utf-16-be", errors="replace"))
    return plain_lines(data.decode("utf-8", errors="replace"))


def plain_lines(text: str) -> str:
    """Return text without a byte-order mark and with plain line ends."""
    return text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")


def unwrap(text: str) -> str:
    """Return the file inside what was pasted; text that is a file already comes back as it is."""
    text = plain_lines(text)
    text = _fenced(text)
    while match := _CELL.match(text):
        text = text[match.end() :]
    return _unprompted(text)


def _fenced(text: str) -> str:
    """Return the fenced blocks of a Markdown text: those of the first block's language, joined."""
    marks = list(_FENCE.finditer(text))
    if not marks:
        return text
    if len(marks) == 1:  # only one end was copied
        mark = marks[0]
        return text[: mark.start()] + text[mark.end() :].removeprefix("\n")
    blocks = [
        (opening.group(2).lower(), text[opening.end() : closing.start()].strip("\n"))
        for opening, closing in zip(marks[::2], marks[1::2], strict=False)
    ]
    language = blocks[0][0]
    return "\n".join(body for named, body in blocks if named == language) + "\n"


def _unprompted(text: str) -> str:
    """Return a terminal's text without its prompts; where lines have them, those without are output."""
    lines = text.split("\n")
    if len(lines) > MAX_PROMPTED:
        return text
    first = next((line for line in lines if line.strip()), "")
    if not (match := _PROMPT.match(first.lstrip())) or not match.group().strip():
        return text
    kept: list[str] = []
    goes_on = False
    for line in lines:
        bare = line.lstrip()
        found = _PROMPT.match(bare)
        if found and found.group().strip():
            bare = bare[found.end() :]
        elif not goes_on:
            continue
        else:
            bare = re.sub(r"^> ", "", bare)
        kept.append(bare)
        goes_on = bare.rstrip().endswith("\\")
    return "\n".join(kept) + "\n"


def written_files(text: str) -> dict[str, str]:
    """Return the files that a shell script writes by `cat > NAME <<EOF`, by name."""
    found = {}
    for match in _HEREDOC.finditer(text):
        name = match["before"] or match["after"]
        if name:
            found[name.strip("\"'")] = match["body"] + "\n"
    return found


def without_heredocs(text: str) -> str:
    """Return the script without what it writes into files that way."""
    return _HEREDOC.sub("\n", text)
