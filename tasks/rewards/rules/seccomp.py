"""System-call filter (seccomp) for programs that a model wrote.

A filtered process computes, reads files, and writes to files that are open already. It cannot start processes, open
files for writing, change or delete files, connect to anything, or signal another process. So killing it ends it.
Source of the format: https://docs.kernel.org/userspace-api/seccomp_filter.html
"""

import ctypes
import errno
import os
import platform
import struct

# Allowed system calls: numbers on x86_64 and aarch64. None: the machine has no such call.
ALLOWED: dict[str, tuple[int | None, int | None]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "lseek": (8, 62), "mmap": (9, 222),
    "mprotect": (10, 226), "munmap": (11, 215), "brk": (12, 214), "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "rt_sigpending": (127, 136), "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137), "pread64": (17, 67), "pwrite64": (18, 68), "readv": (19, 65), "writev": (20, 66),
    "mremap": (25, 216), "madvise": (28, 233), "mincore": (27, 232), "mlock": (149, 228), "munlock": (150, 229),
    "dup": (32, 23), "dup2": (33, None), "dup3": (292, 24), "pause": (34, None), "nanosleep": (35, 101),
    "getitimer": (36, 102), "setitimer": (38, 103), "alarm": (37, None), "getpid": (39, 172), "getppid": (110, 173),
    "gettid": (186, 178), "exit": (60, 93), "exit_group": (231, 94), "wait4": (61, 260), "waitid": (247, 95),
    "uname": (63, 160), "fcntl": (72, 25), "flock": (73, 32), "fsync": (74, 82), "fdatasync": (75, 83),
    "getdents": (78, None), "getdents64": (217, 61), "getcwd": (79, 17), "chdir": (80, 49), "fchdir": (81, 50),
    "readlink": (89, None), "readlinkat": (267, 78), "umask": (95, 166), "gettimeofday": (96, 169),
    "getrlimit": (97, 163), "setrlimit": (160, 164), "getrusage": (98, 165), "sysinfo": (99, 179), "times": (100, 153),
    "getuid": (102, 174), "getgid": (104, 176), "geteuid": (107, 175), "getegid": (108, 177), "getpgrp": (111, None),
    "getpgid": (121, 155), "getsid": (124, 156), "getresuid": (118, 148), "getresgid": (120, 150),
    "getgroups": (115, 158), "sigaltstack": (131, 132), "statfs": (137, 43), "fstatfs": (138, 44),
    "getpriority": (140, 141), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120), "sched_get_priority_max": (146, 125), "sched_get_priority_min": (147, 126),
    "time": (201, None), "futex": (202, 98), "set_tid_address": (218, 96), "restart_syscall": (219, 128),
    "clock_gettime": (228, 113), "clock_getres": (229, 114), "clock_nanosleep": (230, 115),
    "epoll_create": (213, None), "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_wait": (232, None),
    "epoll_pwait": (281, 22), "select": (23, None), "pselect6": (270, 72), "poll": (7, None), "ppoll": (271, 73),
    "timer_create": (222, 107), "timer_settime": (223, 110), "timer_gettime": (224, 108), "timer_delete": (226, 111),
    "timerfd_create": (283, 85), "timerfd_settime": (286, 86), "timerfd_gettime": (287, 87), "eventfd": (284, None),
    "eventfd2": (290, 19), "pipe": (22, None), "pipe2": (293, 59), "socketpair": (53, 199), "sendto": (44, 206),
    "recvfrom": (45, 207), "sendmsg": (46, 211), "recvmsg": (47, 212), "shutdown": (48, 210), "getsockopt": (55, 209),
    "setsockopt": (54, 208), "getsockname": (51, 204), "set_robust_list": (273, 99), "get_robust_list": (274, 100),
    "getrandom": (318, 278), "membarrier": (324, 283), "rseq": (334, 293), "stat": (4, None), "lstat": (6, None),
    "statx": (332, 291), "newfstatat": (262, 79), "access": (21, None), "faccessat": (269, 48),
    "faccessat2": (439, 439), "prctl": (157, 167), "arch_prctl": (158, None), "getcpu": (309, 168),
    "get_mempolicy": (239, 236), "close_range": (436, 436), "signalfd4": (289, 74),
}  # fmt: skip
# Calls whose arguments decide.
CONDITIONAL: dict[str, tuple[int | None, int | None]] = {
    "open": (2, None), "openat": (257, 56), "clone": (56, 220), "clone3": (435, 435), "kill": (62, 129),
    "tgkill": (234, 131), "prlimit64": (302, 261), "ioctl": (16, 29),
}  # fmt: skip
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
CLONE_THREAD = 0x00010000
TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX = 0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451

# Instructions of the filter's machine, and its verdicts.
LOAD, JUMP_IF_EQUAL, JUMP_IF_BITS, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in the kernel's seccomp_data
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def install_filter() -> None:
    """Filter the system calls of this process and its threads, for good.

    Raises OSError where the machine or its kernel has no such filter.
    """
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        raise OSError(errno.ENOSYS, f"no system-call filter for {machine}")
    instructions = filter_program(machine, os.getpid())
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    program = _Program(len(instructions), code)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            code = ctypes.get_errno()
            raise OSError(code, f"the kernel installs no system-call filter ({os.strerror(code)})")


def filter_program(machine: str, pid: int) -> list[Instruction]:
    """Return the filter for a process of this id."""
    column = list(AUDIT_ARCH).index(machine)
    program: list[Instruction] = [
        (LOAD, 0, 0, ARCHITECTURE),
        (JUMP_IF_EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, KILL),  # a call by the numbers of another architecture
        (LOAD, 0, 0, NUMBER),
    ]
    for numbers in ALLOWED.values():
        if (number := numbers[column]) is not None:
            program += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, ALLOW)]
    for name, numbers in CONDITIONAL.items():
        if (number := numbers[column]) is not None:
            block = _conditions(name, pid)
            program += [(JUMP_IF_EQUAL, 0, len(block), number), *block]
    return [*program, _fail(errno.EPERM)]


def _conditions(name: str, pid: int) -> list[Instruction]:
    """Return the instructions that decide on a call of CONDITIONAL."""
    match name:
        case "open":
            return _unless_bits(1, WRITING, errno.EACCES)
        case "openat":
            return _unless_bits(2, WRITING, errno.EACCES)
        case "clone":
            return [_argument(0), (JUMP_IF_BITS, 0, 1, CLONE_THREAD), (RETURN, 0, 0, ALLOW), _fail(errno.EPERM)]
        case "clone3":  # its flags are out of reach; the C library falls back to clone
            return [_fail(errno.ENOSYS)]
        case "kill" | "tgkill":
            return _if_equal(0, (pid,))
        case "prlimit64":
            return _if_equal(0, (0, pid))
        case _:  # ioctl: what Python asks of its files
            return _if_equal(1, (TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX), errno.ENOTTY)


def _unless_bits(argument: int, bits: int, code: int) -> list[Instruction]:
    return [_argument(argument), (JUMP_IF_BITS, 0, 1, bits), _fail(code), (RETURN, 0, 0, ALLOW)]


def _if_equal(argument: int, values: tuple[int, ...], code: int = errno.EPERM) -> list[Instruction]:
    checks = [step for value in values for step in ((JUMP_IF_EQUAL, 0, 1, value), (RETURN, 0, 0, ALLOW))]
    return [_argument(argument), *checks, _fail(code)]


def _argument(number: int) -> Instruction:
    """Return the instruction that loads the low half of an argument (little-endian)."""
    return LOAD, 0, 0, ARGUMENTS + 8 * number


def _fail(code: int) -> Instruction:
    return RETURN, 0, 0, FAIL | code
