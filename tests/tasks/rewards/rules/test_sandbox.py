"""Tests of programs within limits: what passes, what fails, and what does no harm."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from megaswift.tasks.rewards.rules.sandbox import ProgramTest, Sandbox, equal_outputs, equal_results

NO_OUTPUT = ProgramTest(expected="")


@pytest.fixture(scope="module")
def box() -> Sandbox:
    return Sandbox()


def script(text: str, expected: str) -> ProgramTest:
    return ProgramTest(text=text, expected=expected)


def call(function: str, arguments: tuple, expected: object) -> ProgramTest:
    return ProgramTest(function=function, arguments=arguments, expected=expected)


ASSERTIONS = (
    "from solution import f\n\ndef test_one():\n    assert f(1) == 2\n\ndef test_two():\n    assert f(2) == 3\n"
)
PROGRAMS = [  # program, tests, verdicts
    ("print(int(input()) * 2)", [script("4", "8"), script("5", "9"), script("6\n", "12\n")], [True, False, True]),
    ("import sys\nprint(sum(map(int, sys.stdin)))", [script("1\n2\n3", "6")], [True]),
    ("print(open(0).read()[::-1])", [script("abc", "cba")], [True]),
    ("if __name__ == '__main__':\n    print(List[int].__name__, gcd(4, 6))", [script("", "List 2")], [True]),
    ("print(1)\nexit()", [script("", "1")], [True]),
    ("print(1)\nraise SystemExit(3)", [script("", "1")], [False]),
    ("print(1)\n1 / 0", [script("", "1")], [False]),
    ("print(1", [script("", "1")], [False]),
    ("import numpy as np\nprint(np.arange(4).sum())", [script("", "6")], [True]),
    (  # how programs of contests get a deep stack
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(1 << 27)\n"
        "def depth(n):\n    return 0 if n == 0 else 1 + depth(n - 1)\n"
        "threading.Thread(target=lambda: print(depth(50000))).start()",
        [script("", "50000")],
        [True],
    ),
    ("def f(x):\n    return x + 1", [ProgramTest(assertions=ASSERTIONS)], [True]),
    ("def f(x):\n    return 2", [ProgramTest(assertions=ASSERTIONS)], [False]),
    ("def f(x):\n    return x + 1", [ProgramTest(assertions="assert f(1) == 2"), NO_OUTPUT], [True, True]),
    ("def add(a, b):\n    return a + b", [call("add", (1, 2), 3), call("add", ("a", "b"), "ab")], [True, True]),
    ("class Solution:\n    def add(self, a, b):\n        return (a, b)", [call("add", (1, 2), [1, 2])], [True]),
    ("def add(a, b):\n    return a + b", [call("other", (1, 2), 3), call("add", (1,), 1)], [False, False]),
    ("import os\nos._exit(0)", [ProgramTest(assertions="assert False"), call("f", (), 1)], [False, False]),
    ("import sys\nsys.exit(0)", [ProgramTest(assertions="assert False"), call("f", (), 1)], [False, False]),
    ("raise KeyboardInterrupt", [NO_OUTPUT], [False]),
    ("print('\ud800')", [script("\ud800", "?")], [False]),  # half a character
    ("print(input())", [script("\ud800", "?")], [True]),
]


@pytest.mark.parametrize(("program", "tests", "verdicts"), PROGRAMS)
def test_programs(box, program, tests, verdicts):
    assert box([(program, tests)], 60) == [verdicts]


HARM = {
    "forks": "import os\nwhile True:\n    os.fork()",
    "starts programs": "import subprocess\nsubprocess.run(['true'], check=True)",
    "takes 100 GB": "x = bytearray(100 << 30)",
    "grows": "x = []\nwhile True:\n    x.append(bytearray(1 << 24))",
    "prints forever": "while True:\n    print('a' * 10000)",
    "starts threads": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(9,)).start()",
    "connects": "import socket\nsocket.create_connection(('127.0.0.1', 9))",
    "listens": "import socket\nsocket.socket().bind(('127.0.0.1', 0))",
    "signals its parent": "import os\nos.kill(os.getppid(), 9)",
    "signals all": "import os\nos.kill(-1, 9)",
    "writes a file": "open('FOLDER/new', 'w')",
    "changes a file": "open('FOLDER/kept', 'a').write('b')",
    "removes a file": "import os\nos.remove('FOLDER/kept')",
    "removes a folder": "import shutil\nshutil.rmtree('FOLDER')",
    "moves a file": "import os\nos.rename('FOLDER/kept', 'FOLDER/moved')",
    "cuts a file": "import os\nos.truncate('FOLDER/kept', 0)",
    "changes a mode": "import os\nos.chmod('FOLDER/kept', 0)",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "fills memory files": "import os\nos.write(os.memfd_create('x'), b'a')",
}


@pytest.mark.parametrize("harm", HARM)
def test_programs_do_no_harm(box, harm, tmp_path: Path):
    (tmp_path / "kept").write_text("a")
    (tmp_path / "kept").chmod(0o640)
    start = time.monotonic()
    assert box([(HARM[harm].replace("FOLDER", str(tmp_path)), [NO_OUTPUT])], 60) == [[False]]
    assert time.monotonic() - start < 30
    assert [(file.name, file.read_text(), file.stat().st_mode & 0o777) for file in tmp_path.iterdir()] == [
        ("kept", "a", 0o640)
    ]
    assert box([("print(1)", [script("", "1")])], 60) == [[True]]


def test_programs_have_no_capabilities(box):
    program = "print([int(line.split()[1], 16) for line in open('/proc/self/status') if line.startswith('CapE')])"
    assert box([(program, [script("", "[0]")])], 60) == [[True]]


def test_programs_do_not_see_keys(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    program = "import os\nprint(len(os.environ), 'secret' in open('/proc/self/environ').read())"
    assert Sandbox()([(program, [script("", "0 False")])], 60) == [[True]]


def test_output_has_a_limit(box):
    text = "a" * (17 << 20)
    assert box([(f"print('a' * {len(text)})", [script("", text)])], 60) == [[False]]
    text = "a" * (15 << 20)
    assert box([(f"print('a' * {len(text)})", [script("", text)])], 60) == [[True]]


def run_worker(program: str, tests: int = 1, **limits: float) -> tuple[list[bool], float, float]:
    """Run a program's tests, with other limits, in a process as small as a worker.

    Returns the verdicts, the seconds that passed, and the processor's seconds.
    """
    source = """
import json, os, sys, time
from megaswift.tasks.rewards.rules import sandbox
program, tests, limits = json.loads(sys.argv[1])
vars(sandbox).update(limits)
start = time.monotonic()
verdicts = sandbox.passed_tests(program, [sandbox.ProgramTest(expected="1")] * tests)
print(json.dumps([verdicts, time.monotonic() - start, os.times().children_user + os.times().children_system]))
"""
    arguments = json.dumps([program, tests, {"CPU_SECONDS": 1, "WALL_SECONDS": 2.0, **limits}])
    output = subprocess.run(
        [sys.executable, "-c", source, arguments], check=True, capture_output=True, timeout=60
    ).stdout
    return json.loads(output)


@pytest.mark.parametrize(
    "program",
    [
        "while True:\n    pass",
        "import signal\nfor n in range(1, 65):\n    try:\n        signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True:\n    pass",
    ],
)
def test_an_endless_loop_ends(program):
    verdicts, _, processor = run_worker(program, WALL_SECONDS=30.0)
    assert verdicts == [False]
    assert 0.5 < processor < 3


def test_a_program_that_waits_is_killed():
    verdicts, seconds, _ = run_worker("import time\ntime.sleep(99)")
    assert verdicts == [False]
    assert 2 <= seconds < 10


def test_tests_beyond_the_time_of_a_program_fail():
    slow = "import time\nprint(1)\ntime.sleep(1.2)"
    assert run_worker(slow, tests=3, WALL_SECONDS=30.0, PROGRAM_SECONDS=1.0)[0] == [True, False, False]


def test_a_machine_without_limits_is_an_error():
    """Without a filter a program can fork, which the worker sees before it takes any program."""
    source = (
        "from megaswift.tasks.rewards.rules import program_child, sandbox\n"
        "program_child.install_filter = lambda: None\nprint(sandbox.check_limits())"
    )
    output = subprocess.run(
        [sys.executable, "-c", source], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert "its kernel has no system-call filter (seccomp)" in output


def test_programs_beyond_the_time_of_a_call_have_no_verdict(box):
    sleeping = ("import time\ntime.sleep(99)", [NO_OUTPUT])
    requests = [sleeping] * 2 * box._max_workers
    start = time.monotonic()
    assert box(requests, 1.5) == [None] * len(requests)
    assert time.monotonic() - start < 10
    assert box([("print(1)", [script("", "1")])], 60) == [[True]]


@pytest.mark.parametrize(
    ("output", "expected", "equal"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \n3", "1 2\n3", True),
        ("0.3333333", "0.33333333", True),
        ("1e-3", "0.001", True),
        ("2", "2.0", True),
        ("YES", "YES", True),
        ("", "\n", True),
        ("1 2 3", "1 2\n3", False),
        ("1", "1 2", False),
        ("2.0", "2", False),  # an integer is expected
        ("0.34", "0.33", False),
        ("yes", "YES", False),
        ("nan", "0.5", False),
    ],
)
def test_outputs(output, expected, equal):
    assert equal_outputs(output, expected) == equal


@pytest.mark.parametrize(
    ("result", "expected", "equal"),
    [
        ("3", 3, True),
        ("[1, 2]", [1, 2], True),
        ("3", [3], True),  # APPS wraps results
        ("0.30000000000000004", 0.3, True),
        ("3", 3.0, True),
        ('{"a": [1.0]}', {"a": [1.0]}, True),
        ("null", None, True),
        ("true", 1, False),
        ("3.1", 3, False),
        ('"3"', 3, False),
        ("[1, 2]", [2, 1], False),
        ("", None, False),
        ("[1", [1], False),
    ],
)
def test_results(result, expected, equal):
    assert equal_results(result, expected) == equal
