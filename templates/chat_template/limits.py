"""CPU-time and memory limits for chat templates, which are programs that come with a model.

A template is first compiled and rendered in a separate process, which the operating system ends at the limits:
Jinja's sandbox bounds neither the size of a text nor nested loops, and Python cannot interrupt `'x' * 10**10`.
"""

import json
import resource
import subprocess
import sys
from functools import cache

SECONDS = 10  # CPU-time limit; templates of known models take a few ms
MEMORY = 2 * 2**30  # address-space limit in bytes
EXCEEDED = 3  # exit code of a process that ran out of memory


@cache
def exceeded_limit(template: str, context: str) -> str | None:
    """Return the limit that a template exceeds, as text for an error, or None.

    context: variables to render it with, as JSON
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


def render(template: str, context: dict) -> None:
    """Render a template as transformers does. Raises jinja2's errors and MemoryError."""
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationTag(Extension):
        """`{% generation %}` of transformers, without its bookkeeping."""

        tags = frozenset({"generation"})  # pyright: ignore[reportAssignmentType]

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
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
        sys.exit(0)  # check_template reports the error


if __name__ == "__main__":
    main()
