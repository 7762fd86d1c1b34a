"""CPU-time and memory limits for chat templates, which are programs that come with a model.

A template is first compiled and rendered in a process of its own, which the operating system ends at the limits:
Jinja's sandbox bounds neither the size of a text nor nested loops, and Python cannot interrupt `'x' * 10**10`.
"""

import json
import resource
import subprocess
import sys
from functools import cache
from typing import Any

SECONDS = 10  # CPU-time limit; templates of known models take a few ms
MEMORY = 2 * 2**30  # address-space limit in bytes
EXCEEDED = 3  # exit code of the process where memory ran out


@cache
def excess_of(template: str, context: str) -> str | None:
    """Return the limit that a template exceeds, as text for an error, or None.

    context: the variables that it is rendered with, as JSON.
    """
    process = subprocess.run(
        [sys.executable, "-P", __file__, str(SECONDS)],
        input=json.dumps([template, context]),
        text=True,
        capture_output=True,
    )
    if process.returncode == EXCEEDED:
        return f"it needs more than {MEMORY >> 30} GiB of memory"
    if process.returncode < 0:  # SIGXCPU, then SIGKILL
        return f"it takes longer than {SECONDS} s"
    return None


def render(template: str, context: dict[str, Any]) -> None:
    """Render a template as transformers does. Raises jinja2's errors and MemoryError."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` of transformers, without its bookkeeping."""

        tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.globals |= {"raise_exception": refuse, "strftime_now": lambda form: form}
    environment.from_string(template).render(**context)


def main() -> None:
    seconds = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    template, context = json.load(sys.stdin)
    try:
        render(template, json.loads(context))
    except MemoryError:
        sys.exit(EXCEEDED)
    except Exception:
        sys.exit(0)  # check_template says what is wrong with it


if __name__ == "__main__":
    main()
