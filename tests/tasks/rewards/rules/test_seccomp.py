"""System-call filter: its numbers beside the kernel's headers, and the filter by an interpreter of its instructions."""

import errno
import os
import platform
import re
from pathlib import Path

import pytest
from megaswift.tasks.rewards.rules import seccomp

PID = 4711
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}
RENAMED = {"fstatat": "newfstatat"}  # generic name -> the kernel's


def verdict(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """What the filter says of a call: the kernel's own steps, for the four instructions that it uses."""
    data = {0: number, 4: seccomp.AUDIT_ARCH[machine] if architecture is None else architecture}
    data |= {16 + 8 * i: argument & 0xFFFFFFFF for i, argument in enumerate((*arguments, 0, 0, 0))}
    program, position, register = seccomp.filter_program(machine, PID), 0, 0
    while True:
        code, if_true, if_false, operand = program[position]
        position += 1
        match code:
            case 0x20:
                register = data[operand]
            case 0x15:
                position += if_true if register == operand else if_false
            case 0x45:
                position += if_true if register & operand else if_false
            case 0x06:
                return operand


def number(machine: str, name: str) -> int:
    found = (seccomp.ALLOWED | seccomp.CONDITIONAL)[name][list(seccomp.AUDIT_ARCH).index(machine)]
    assert found is not None
    return found


@pytest.mark.parametrize("machine", seccomp.AUDIT_ARCH)
def test_numbers_are_the_kernels(machine):
    header = HEADERS[machine]
    if not header.is_file():
        pytest.skip(f"{header}: headers of the kernel")
    pattern = re.compile(r"#define __NR(?:3264)?_(\w+)\s+(\d+)")
    numbers = {RENAMED.get(name, name): int(value) for name, value in pattern.findall(header.read_text())}
    column = list(seccomp.AUDIT_ARCH).index(machine)
    ours = {name: pair[column] for name, pair in (seccomp.ALLOWED | seccomp.CONDITIONAL).items()}
    assert ours == {name: numbers.get(name) for name in ours}


@pytest.mark.parametrize("machine", seccomp.AUDIT_ARCH)
@pytest.mark.parametrize(
    ("name", "arguments", "allowed"),
    [
        ("read", (), True),
        ("mmap", (), True),
        ("openat", (0, 0, os.O_RDONLY | os.O_CLOEXEC), True),
        ("openat", (0, 0, os.O_WRONLY), False),
        ("openat", (0, 0, os.O_RDWR), False),
        ("openat", (0, 0, os.O_RDONLY | os.O_CREAT), False),
        ("openat", (0, 0, os.O_RDONLY | os.O_TRUNC), False),
        ("clone", (0x00010000 | 0x100,), True),  # a thread
        ("clone", (0x11,), False),  # a process: SIGCHLD
        ("clone", (0x10000000,), False),  # a user namespace
        ("clone3", (), False),
        ("kill", (PID, 9), True),
        ("kill", (PID + 1, 9), False),
        ("kill", (-1, 9), False),
        ("kill", (0, 9), False),
        ("tgkill", (PID, 5, 9), True),
        ("tgkill", (1, 1, 9), False),
        ("prlimit64", (0,), True),
        ("prlimit64", (1,), False),
        ("ioctl", (0, 0x5401), True),
        ("ioctl", (0, 0x5412), False),  # TIOCSTI types into a terminal
        ("ioctl", (0, 0x40086602), False),  # FS_IOC_SETFLAGS
    ],
)
def test_verdicts(machine, name, arguments, allowed):
    assert (verdict(machine, number(machine, name), *arguments) == seccomp.ALLOW) == allowed


@pytest.mark.parametrize("machine", seccomp.AUDIT_ARCH)
def test_other_calls_fail(machine):
    allowed = {
        pair[list(seccomp.AUDIT_ARCH).index(machine)] for pair in (seccomp.ALLOWED | seccomp.CONDITIONAL).values()
    }
    others = [n for n in range(600) if n not in allowed]
    assert len(others) > 400
    assert {verdict(machine, n) for n in others} == {seccomp.FAIL | errno.EPERM}
    assert verdict(machine, 0x40000000 | number(machine, "read")) == seccomp.FAIL | errno.EPERM  # x32's numbers
    assert verdict(machine, number(machine, "read"), architecture=0x40000003) == seccomp.KILL


def test_machines_without_a_filter(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(OSError, match="no system-call filter for riscv64"):
        seccomp.install_filter()
