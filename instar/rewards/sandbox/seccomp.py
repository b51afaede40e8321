"""Builds seccomp filters, which are BPF programs that deny system calls."""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Iterable

from instar.errors import ConfigError

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16

# Instructions, return values, and offsets in struct seccomp_data.
_BPF_LD, _BPF_JEQ, _BPF_JGE, _BPF_JSET, _BPF_RET = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_DENY = _ERRNO | errno.EPERM
_NUMBER_OFFSET, _ARCH_OFFSET, _FIRST_ARGUMENT_OFFSET, _SECOND_ARGUMENT_OFFSET = 0, 4, 16, 24
_X32_SYSCALL_BIT = 0x40000000
_CLONE3_NUMBER = 435
_FIRST_UNKNOWN_NUMBER = 450  # calls from this number on are not in the table and fail with ENOSYS
_NEW_NAMESPACES = 0x7E020080
"""The bits CLONE_NEW{TIME,NS,CGROUP,UTS,IPC,USER,PID,NET}."""
_CLONE_THREAD = 0x00010000

_AUDIT_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# fmt: off
_SYSCALL_NUMBERS: dict[str, tuple[int, int]] = {  # (x86_64, aarch64); -1 if the call does not exist
    "socket": (41, 198), "clone": (56, 220), "prlimit64": (302, 261), "sched_setaffinity": (203, 122),
    "fcntl": (72, 25),
    # Creating processes.
    "fork": (57, -1), "vfork": (58, -1), "execve": (59, 221), "execveat": (322, 281),
    # Namespaces, mounts, other processes, the kernel.
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "chroot": (161, 51),
    "pivot_root": (155, 41), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "kcmp": (312, 272), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "bpf": (321, 280), "perf_event_open": (298, 241),
    "userfaultfd": (323, 282), "fanotify_init": (300, 262), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "vhangup": (153, 58), "iopl": (172, -1),
    "ioperm": (173, -1), "modify_ldt": (154, -1), "uselib": (134, -1), "personality": (135, 92),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442), "quotactl_fd": (443, 443),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # Memory that belongs to no process and therefore escapes the limits.
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "shmctl": (31, 195), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    # From here on, denied only with `shares_host_processes`: calls that let a job leave its process group...
    "setsid": (112, 157), "setpgid": (109, 154),
    # ...affect other processes of the same user (for signals, `allow_signals` decides instead)...
    "setpriority": (141, 140), "sched_setscheduler": (144, 119), "sched_setparam": (142, 118),
    "sched_setattr": (314, 274), "ioprio_set": (251, 30), "migrate_pages": (256, 238),
    "move_pages": (279, 239), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424),
    # ...or change files in ways that Landlock does not restrict.
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, -1), "fchown": (93, 55),
    "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}
# fmt: on
_CONDITIONAL_CALLS = ("socket", "clone", "prlimit64", "sched_setaffinity", "fcntl")
_SIGNAL_CALLS = ("kill", "tkill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal")
_SIGNAL_OWNER_COMMANDS = (8, 10, 15)
"""F_SETOWN, F_SETSIG and F_SETOWN_EX, which select the process that is signalled when a file is ready."""
_PROCESS_CALLS = ("fork", "vfork", "execve", "execveat")
_OTHER_CALLS = [
    name for name in _SYSCALL_NUMBERS if name not in (*_CONDITIONAL_CALLS, *_SIGNAL_CALLS, *_PROCESS_CALLS)
]
_DENIED_ALWAYS = _OTHER_CALLS[: _OTHER_CALLS.index("setsid")]
_DENIED_WITH_HOST_PROCESSES = _OTHER_CALLS[_OTHER_CALLS.index("setsid") :]


def is_supported() -> bool:
    return platform.machine() in _AUDIT_ARCHES


def check_supported() -> None:
    if not is_supported():
        supported = " or ".join(_AUDIT_ARCHES)
        raise ConfigError(
            f"sandboxes require {supported}, but this machine's architecture is {platform.machine()!r}"
        )


def build_filter(
    socket_families: Iterable[int],
    *,
    shares_host_processes: bool,
    allow_signals: bool = True,
    deny_new_processes: bool = False,
) -> bytes:
    """Build a filter that denies calls that no job needs, new namespaces, and sockets outside
    ``socket_families``. With ``shares_host_processes``, it also denies leaving the process group, changing
    the limits or scheduling of other processes, and changing file attributes. Signals are denied unless
    ``allow_signals`` is True. ``deny_new_processes`` still allows threads."""
    machine = platform.machine()
    column = list(_AUDIT_ARCHES).index(machine)
    numbers = {name: pair[column] for name, pair in _SYSCALL_NUMBERS.items() if pair[column] >= 0}
    denied = list(_DENIED_ALWAYS)
    conditional = {
        "socket": _match_values(_FIRST_ARGUMENT_OFFSET, socket_families, _ALLOW, _DENY),
        "clone": _test_bits(_NEW_NAMESPACES, if_set=_DENY, if_clear=_ALLOW),
    }
    if shares_host_processes:
        denied += _DENIED_WITH_HOST_PROCESSES
        only_self = _match_values(_FIRST_ARGUMENT_OFFSET, [0], _ALLOW, _DENY)
        conditional["prlimit64"] = conditional["sched_setaffinity"] = only_self
    if deny_new_processes:
        denied += _PROCESS_CALLS
        conditional["clone"] = _test_bits(_CLONE_THREAD, if_set=_ALLOW, if_clear=_DENY)
    if not allow_signals:
        denied += _SIGNAL_CALLS
        conditional["fcntl"] = _match_values(_SECOND_ARGUMENT_OFFSET, _SIGNAL_OWNER_COMMANDS, _DENY, _ALLOW)
    program = [
        _pack(_BPF_LD, _ARCH_OFFSET),
        _pack(_BPF_JEQ, _AUDIT_ARCHES[machine], 1, 0),
        _pack(_BPF_RET, _KILL),
        _pack(_BPF_LD, _NUMBER_OFFSET),
        _pack(_BPF_JGE, _X32_SYSCALL_BIT, 0, 1),
        _pack(_BPF_RET, _DENY),
        _pack(_BPF_JGE, _FIRST_UNKNOWN_NUMBER, 0, 1),
        _pack(_BPF_RET, _ERRNO | errno.ENOSYS),
        # The flags of clone3 are in memory, which filters cannot read. The C library falls back to clone.
        *_return_if_equal(_CLONE3_NUMBER, _ERRNO | errno.ENOSYS),
    ]
    for name in denied:
        if name in numbers:
            program += _return_if_equal(numbers[name], _DENY)
    for name, rule in conditional.items():
        program += [_pack(_BPF_JEQ, numbers[name], 0, len(rule)), *rule]
    return b"".join([*program, _pack(_BPF_RET, _ALLOW)])


def _match_values(offset: int, values: Iterable[int], if_equal: int, otherwise: int) -> list[bytes]:
    matches = [instruction for value in values for instruction in _return_if_equal(value, if_equal)]
    return [_pack(_BPF_LD, offset), *matches, _pack(_BPF_RET, otherwise)]


def _test_bits(mask: int, *, if_set: int, if_clear: int) -> list[bytes]:
    """Return BPF code that returns ``if_set`` if any bit in ``mask`` is set in a call's first argument."""
    return [
        _pack(_BPF_LD, _FIRST_ARGUMENT_OFFSET),
        _pack(_BPF_JSET, mask, 0, 1),
        _pack(_BPF_RET, if_set),
        _pack(_BPF_RET, if_clear),
    ]


def _return_if_equal(value: int, result: int) -> list[bytes]:
    return [_pack(_BPF_JEQ, value, 0, 1), _pack(_BPF_RET, result)]


def _pack(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)
