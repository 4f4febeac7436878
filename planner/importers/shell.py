"""Reads shell scripts without running them: assignments, defaults, arrays, arithmetic, commands."""

import re
import shlex
from dataclasses import dataclass, field

MAX_EXPANSION = 100_000
_ASSIGN = re.compile(
    r"^(?:export\s+|local\s+|declare\s+(?:-\w+\s+)?)?([A-Za-z_]\w*)=(.*)$", re.DOTALL
)
_ARRAY = re.compile(r"^\s*([A-Za-z_]\w*)\+?=\((.*?)^\s*\)", re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"\$\{([A-Za-z_]\w*)(?:(:?[-=+])([^{}]*))?\}|\$([A-Za-z_]\w*)")
_ARRAY_USE = re.compile(r"\"?\$\{([A-Za-z_]\w*)\[[@*]\]\}\"?")
_EXPR = re.compile(r"\$\(\s*expr\s+([^()]*?)\)|\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_ARITHMETIC = re.compile(r"^[\d\s+*/%()-]+$")


@dataclass
class Script:
    """Commands of a script, every variable that could be evaluated put in."""

    commands: list[list[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    prefixes: list[dict[str, str]] = field(default_factory=list)
    """Assignments before each command."""
    not_understood: list[str] = field(default_factory=list)


def parse_shell(text: str) -> Script:
    """Return the script's commands; conditions take the GPU arm, nothing is executed."""
    script = Script()
    text = re.sub(r"\\\s*(?:#[^\n]*)?\n", " ", text)
    arrays: dict[str, str] = {}

    def keep(match: re.Match[str]) -> str:
        body = "\n".join(_uncommented(line) for line in match.group(2).split("\n"))
        arrays[match.group(1)] = arrays.get(match.group(1), "") + " " + body.replace("\n", " ")
        return ""

    text = _ARRAY.sub(keep, _gpu_arms(text))
    for line in text.split("\n"):
        line = _uncommented(line).strip()
        if not line or re.match(
            r"^(?:if|then|else|fi|for|do|done|case|esac|set|function|\}|\{)\b|^[{}]$", line
        ):
            continue
        for part in re.split(r"\s*(?:&&|\|\||;(?!;)|(?<!\|)\|(?!\|))\s*", line):
            _statement(script, part.strip(), arrays)
    return script


def _gpu_arms(text: str) -> str:
    """Keep the GPU (or default) arm of case statements."""

    def choose(match: re.Match[str]) -> str:
        arms = re.findall(r"^\s*([^)\n]+)\)(.*?);;", match.group(1), re.DOTALL | re.MULTILINE)
        wanted = [
            body for pattern, body in arms if re.search(r"gpu|cuda|nvidia", pattern, re.IGNORECASE)
        ]
        default = [body for pattern, body in arms if pattern.strip() in ("*", '""')]
        return "\n".join(wanted[:1] or default[:1])

    return re.sub(
        r"^\s*case\b[^\n]*\bin\b(.*?)^\s*esac", choose, text, flags=re.DOTALL | re.MULTILINE
    )


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
    expanded = expand(part, script.environment, arrays)
    try:
        words = shlex.split(expanded)
    except ValueError:
        script.not_understood.append(part[:120])
        return
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


def expand(text: str, environment: dict[str, str], arrays: dict[str, str]) -> str:
    """Return `text` with known variables, defaults, arrays and arithmetic put in."""
    for _ in range(8):
        before = text
        text = _ARRAY_USE.sub(lambda match: arrays.get(match.group(1), match.group()), text)
        text = _VARIABLE.sub(lambda match: _value(match, environment), text)
        text = _EXPR.sub(_arithmetic, text)
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


def _arithmetic(match: re.Match[str]) -> str:
    expression = (match.group(1) or match.group(2) or "").replace("\\*", "*").strip()
    if not _ARITHMETIC.match(expression) or len(expression) > 200 or "**" in expression:
        return match.group()
    from planner.importers.python_calls import fold_constant

    value = fold_constant(expression.replace("/", "//").replace("////", "//"))
    return str(value) if isinstance(value, int) else match.group()


def flags(words: list[str]) -> dict[str, object]:
    """Return --key value, --key=value and bare switches; a repeated value becomes a list."""
    found: dict[str, object] = {}
    index = 0
    while index < len(words):
        word = words[index]
        index += 1
        if not re.match(r"^--?[A-Za-z]", word):
            continue
        key, has_value, value = word.lstrip("-").partition("=")
        if has_value:
            found[key] = value
            continue
        values = []
        while index < len(words) and not re.match(r"^--?[A-Za-z]", words[index]):
            values.append(words[index])
            index += 1
        if not values and key.startswith(("no_", "no-")):
            found[key[3:]] = False
        else:
            found[key] = True if not values else values[0] if len(values) == 1 else values
    return found
