"""Reads shell scripts without running them: assignments, defaults, arrays, arithmetic, commands."""

import re
import shlex
from dataclasses import dataclass, field

from planner.importers.pasted import without_heredocs

MAX_EXPANSION = 100_000
MAX_QUOTED_LINES = 200
"""Lines that one quoted string may take."""
_ASSIGN = re.compile(
    r"^(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)=(.*)$", re.DOTALL
)
_ARRAY = re.compile(
    r"^[ \t]*([A-Za-z_]\w*)(\+?)=\((?:[ \t]*\n(.*?)^[ \t]*\)|([^()]*)\))[ \t]*$",
    re.MULTILINE | re.DOTALL,
)
"""An array: over several lines up to a bracket on a line of its own, so that its words may have brackets."""
_ECHOED = re.compile(r"\$\([^()]*\|\|\s*echo (\w+)\s*\)")
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*|\d)(?:(:?[-=+])([^{}]*))?\}|\$([A-Za-z_]\w*)")
_UNSET_INSIDE = re.compile(r"\$\{([A-Za-z_]\w*)\}(?=[^{}\s]*\})")
_ARRAY_USE = re.compile(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?")
_ENDS_VALUES = re.compile(rf"--?[A-Za-z]|(?:{_ARRAY_USE.pattern})$")
_INNER = re.compile(r"\$\([^()]*\)")
"""$(one | two): its pipe ends no command of the line."""
_HIDDEN, _SHOWN = str.maketrans("|&;", "\x01\x02\x03"), str.maketrans("\x01\x02\x03", "|&;")
_EXPR = re.compile(r"\$\(\s*expr\s+([^()]*?)\)|\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_FLAG = re.compile(r"\s*(--?[A-Za-z][\w.-]*|[+~]*[A-Za-z_]\w*\.[\w.]+(?==))")
"""A flag or a dotted override at the start of a line."""
_OPENS = re.compile(r"\s*[A-Za-z_]\w*\+?=\([^)]*$")
_READ_HEREDOC = re.compile(
    r"^[ \t]*read\s+(?:-\w+\s+(?:''\s*)?)*(?P<name>[A-Za-z_]\w*)\s*<<-?\s*(['\"]?)(?P<end>\w+)\2[ \t]*\n"
    r"(?P<body>.*?)\n[ \t]*(?P=end)[ \t]*$",
    re.DOTALL | re.MULTILINE,
)
"""read -r -d '' NAME <<EOF: a command kept in a variable."""
_PAIR = re.compile(r"--[a-z][\w-]+ [\w./-]+$")
_NAME = re.compile(r"(?<![\w$])[A-Za-z_]\w*")
_ARITHMETIC = re.compile(r"^[\d\s+*/%()-]+$")


@dataclass
class Script:
    """Commands of a script, every variable that could be evaluated put in."""

    commands: list[list[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    prefixes: list[dict[str, str]] = field(default_factory=list)
    """Assignments before each command."""
    not_understood: list[str] = field(default_factory=list)
    cut_off: list[str] = field(default_factory=list)
    """Flags that a comment line inside a continued command keeps from it: bash ends the command there."""


def parse_shell(text: str) -> Script:
    """Return the script's commands; conditions take the GPU arm, nothing is executed."""
    script = Script()
    text = _READ_HEREDOC.sub(_assigned, text)
    text = _joined(without_heredocs(text), script)
    arrays: dict[str, str] = {}

    def keep(match: re.Match[str]) -> str:
        lines = (match.group(3) or match.group(4) or "").split("\n")
        body = " ".join(_uncommented(line).strip() for line in lines)
        own = arrays.get(match.group(1), "")
        body = _ARRAY_USE.sub(lambda use: own if use[1] == match.group(1) else use.group(), body)
        before = own if match.group(2) else ""
        arrays[match.group(1)] = f"{before} {body}".strip()
        return ""

    # $(probe && echo npu || echo gpu): the last echo is what a machine without the probe prints
    text = _ECHOED.sub(lambda match: match.group(1), _gpu_arms(text))
    text = "\n".join(_uncommented(line) for line in text.split("\n"))
    text = _ARRAY.sub(keep, text)
    for line in text.split("\n"):
        line = _uncommented(line).strip()
        if not line or re.match(
            r"^(?:if|then|else|fi|for|do|done|case|esac|set|function|\}|\{)\b|^[{}]$", line
        ):
            continue
        line = _INNER.sub(lambda inner: inner.group().translate(_HIDDEN), _quotes_hidden(line))
        for part in re.split(r"\s*(?:&&|\|\||;(?!;)|(?<!\|)\|(?!\|))\s*", line):
            _statement(script, part.strip().translate(_SHOWN), arrays)
    return script


def _assigned(match: re.Match[str]) -> str:
    """Return the body of a `read ... <<EOF` as an assignment on one line."""
    lines = [re.sub(r"\\\s*$", "", line).strip() for line in match["body"].split("\n")]
    body = " ".join(line for line in lines if line and not line.startswith("#"))
    return f"{match['name']}={shlex.quote(body)}"


def _joined(text: str, script: Script) -> str:
    """Return the text with continued lines joined, as bash does.

    A comment in a continued command goes to the end of that line, so the command ends there and what follows
    starts another: its flags are kept in `cut_off`.
    """
    lines: list[str] = []
    open_command, lost, in_array = "", False, False
    for line in _quoted_on_one_line(text.split("\n")):
        part, goes_on = _continued(line)
        if lost and (flag := _FLAG.match(line)):
            script.cut_off.append(flag.group(1))
            lost = goes_on
            continue
        lost = False
        if open_command and re.match(r"\s*#", line):
            if not in_array:
                lines.append(open_command)
                open_command, lost = "", True
            continue
        in_array = bool(_OPENS.match(line)) or (in_array and not re.match(r"\s*\)", line))
        open_command += part + (" " if goes_on else "")
        if not goes_on:
            lines.append(open_command)
            open_command = ""
    return "\n".join([*lines, open_command])


def _quoted_on_one_line(lines: list[str]) -> list[str]:
    """Return the lines with a quoted string that goes over several of them on one line."""
    out: list[str] = []
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if ('"' not in line and "'" not in line) or _closed(line):
            out.append(line)
            continue
        whole, last = line, index
        while last < min(len(lines), index + MAX_QUOTED_LINES) and not _closed(whole):
            whole = re.sub(r"\\\s*$", "", whole) + " " + re.sub(r"^\s*#.*", "", lines[last]).strip()
            last += 1
        if _closed(whole):
            out.append(whole)
            index = last
        else:  # a lone quote, as in prose
            out.append(line)
    return out


def _closed(text: str) -> bool:
    """Return whether every quote of a command is closed."""
    quote, escaped = "", False
    for index, char in enumerate(text):
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (index == 0 or text[index - 1] in " \t"):
            return True
    return not quote


def _continued(line: str) -> tuple[str, bool]:
    """Return a line without its final backslash, and whether it had one (blanks after it are forgiven)."""
    bare = line.rstrip()
    if bare.endswith("\\") and not bare.endswith("\\\\"):
        return bare[:-1], True
    # "value \\  # why": a comment after the backslash, as people annotate arrays
    if match := re.match(r"^(.*)\\\s+#[^\n]*$", line):
        return match.group(1), True
    return line, False


def _gpu_arms(text: str) -> str:
    """Return the text with every case statement replaced by its GPU (or default) arm, nested too."""
    lines = text.split("\n")
    out, _ = _block(lines, 0)
    return "\n".join(out)


def _block(lines: list[str], start: int) -> tuple[list[str], int]:
    """Return the lines up to an unmatched esac, cases resolved, and where they end."""
    out: list[str] = []
    index = start
    while index < len(lines):
        stripped = _uncommented(lines[index]).strip()
        if stripped == "esac" or stripped.startswith("esac "):
            return out, index
        if re.match(r"case\b.*\bin\b", stripped):
            body, index = _block(lines, index + 1)
            out += _chosen_arm(body)
        else:
            out.append(lines[index])
        index += 1
    return out, index


def _chosen_arm(body: list[str]) -> list[str]:
    arms: list[tuple[str, list[str]]] = []
    for line in body:
        match = re.match(r"^\s*\(?([^()\s$=][^()$=]*)\)(.*)$", line)
        if match and (not arms or arms[-1][1][-1:] == [";;"]):
            arms.append((match.group(1).strip(), []))
            line = match.group(2)
        if not arms:
            continue
        rest, ends, _ = line.partition(";;")
        arms[-1][1].append(rest)
        if ends:
            arms[-1][1].append(";;")
    wanted = [
        arm
        for pattern, arm in arms
        if re.search(r"\b(?:gpu|cuda|nvidia)\b", pattern, re.IGNORECASE)
    ]
    default = [arm for pattern, arm in arms if pattern in ("*", '""')]
    return [line for line in (wanted or default or [[]])[0] if line != ";;"]


def _quotes_hidden(line: str) -> str:
    """Return a line whose operators inside quotes are hidden: they belong to another shell (bash -c "a && b")."""
    if not re.search("[|&;]", line) or not _closed(line):
        return line
    out, quote, escaped = [], "", False
    for char in line:
        out.append(char.translate(_HIDDEN) if quote else char)
        if escaped:
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
    return "".join(out)


def _uncommented(line: str) -> str:
    if "#" not in line:
        return line
    quote = ""
    for index, char in enumerate(line):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char == "#" and (index == 0 or line[index - 1] in " \t"):
            return line[:index]
    return line


def _statement(script: Script, part: str, arrays: dict[str, str]) -> None:
    if not part:
        return
    if part.startswith(": "):  # : "${NAME:=value}" sets a default
        for name, value in re.findall(r"\$\{([A-Za-z_]\w*):?=([^{}]*)\}", part):
            if not script.environment.get(name):
                script.environment[name] = expand(value, script.environment, arrays).strip("\"'")
        return
    expanded = expand(part, script.environment, arrays)
    try:
        words = shlex.split(expanded)
    except ValueError:
        script.not_understood.append(part[:120])
        return
    words = _without_redirections(words)
    prefix: dict[str, str] = {}
    while words:
        if words[0] in ("export", "env", "exec", "sudo", "nohup", "time"):
            words.pop(0)
            continue
        match = _ASSIGN.match(words[0])
        if match is None:
            break
        prefix[match.group(1)] = match.group(2)
        words.pop(0)
    if not words:
        script.environment.update(prefix)
        return
    script.commands.append(words)
    script.prefixes.append({**script.environment, **prefix})


def _without_redirections(words: list[str]) -> list[str]:
    """Return a command without > file, 2>&1, < file and the & that sends it to the background."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"(?:\d|&)?>{1,2}|<{1,3}", word):
            skip = True
        elif not re.fullmatch(r"(?:\d|&)?>{1,2}\S+|&", word):
            kept.append(word)
    return kept


def expand(text: str, environment: dict[str, str], arrays: dict[str, str]) -> str:
    """Return `text` with known variables, defaults, arrays and arithmetic put in."""
    for _ in range(8):
        before = text
        text = _ARRAY_USE.sub(lambda match: arrays.get(match.group(1), match.group()), text)
        text = _VARIABLE.sub(lambda match: _value(match, environment), text)
        text = _EXPR.sub(lambda match: _arithmetic(match, environment), text)
        if text == before:  # ${A:-${B}/x} without B: its own braces hide what they stand in
            text = _UNSET_INSIDE.sub(r"$\1", text)
        if text == before or len(text) > MAX_EXPANSION:
            break
    return text[:MAX_EXPANSION]


def _value(match: re.Match[str], environment: dict[str, str]) -> str:
    name = match.group(1) or match.group(4)
    if match.group(2) and match.group(2).endswith("+"):
        return match.group(3) if environment.get(name) else ""
    if name in environment and (environment[name] or not match.group(2)):
        return environment[name]
    if match.group(2):
        return match.group(3).strip("\"'")
    return "" if name in ("@", "*", "MACHINE") else match.group()


def _arithmetic(match: re.Match[str], environment: dict[str, str]) -> str:
    expression = (match.group(1) or match.group(2) or "").replace("\\*", "*").strip()
    # inside $(( )) a variable needs no dollar
    expression = _NAME.sub(lambda name: environment.get(name.group(), name.group()), expression)
    if not _ARITHMETIC.match(expression) or len(expression) > 200 or "**" in expression:
        return match.group() if match.group(1) else re.sub(r"\s+", "", match.group())
    from planner.importers.python_calls import fold_constant

    value = fold_constant(expression.replace("/", "//").replace("////", "//"))
    return str(value) if isinstance(value, int) else match.group()


def flags(words: list[str]) -> dict[str, object]:
    """Return --key value, --key=value and bare switches; a repeated value becomes a list.

    An array that the script does not fill (`${MODEL_ARGS[@]}` of a file it sources) is no flag's value: it stands
    under its own name, so that the report lists it.
    """
    found: dict[str, object] = {}
    index = 0
    # an array's "--flag value" in one pair of quotes
    words = [
        part for word in words for part in (word.split(" ", 1) if _PAIR.match(word) else [word])
    ]
    while index < len(words):
        word = words[index]
        index += 1
        if _ARRAY_USE.fullmatch(word):
            found[word.strip('"')] = "not filled in this script"
        if not re.match(r"^--?[A-Za-z]", word):
            continue
        key, has_value, value = word.lstrip("-").partition("=")
        if has_value:
            found[key] = value
            continue
        values = []
        while index < len(words) and not _ENDS_VALUES.match(words[index]):
            values.append(words[index])
            index += 1
        if not values and key.startswith(("no_", "no-")):
            found[key[3:]] = False
        else:
            found[key] = True if not values else values[0] if len(values) == 1 else values
    return found
