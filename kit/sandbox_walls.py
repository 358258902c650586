"""
sandbox_walls.py: what the kernel refuses to a worker.

Concept     A worker puts up the walls around itself, before it sees any code, and nobody takes them
            down again: seccomp refuses system calls, Landlock paths, rlimits sizes; a tmpfs (files
            in memory) bounds what is written.
Paper       nothing: CodeV's Appendix 13 asks for isolation, not for these walls
In          the limits, the worker's folder, its input image
Out         which walls stand
Left out    cgroups, an allow-list of system calls; anything but Linux on x86-64 and aarch64
Read next   sandbox_server.py (who calls `lock_in`), the head of sandbox.py (what is not contained)
"""

import ctypes
import errno
import functools
import os
import resource
import signal
import struct
import sys

from PIL import Image


WALLS = {"files", "calls", "rights", "sizes", "disk"}       # lock_in puts them up

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}    # linux/audit.h
MACHINE = os.uname().machine
libc = ctypes.CDLL(None, use_errno=True)

# System calls by name, with their numbers on x86-64 and on aarch64 (-1: it has none).
REFUSED = """fork 57 -1, vfork 58 -1, clone 56 220, execve 59 221, execveat 322 281, ptrace 101 117,
socket 41 198, socketpair 53 199, kill 62 129, tkill 200 130, tgkill 234 131,
rt_sigqueueinfo 129 138, kcmp 312 272, rt_tgsigqueueinfo 297 240, pidfd_open 434 434,
pidfd_send_signal 424 424, pidfd_getfd 438 438, process_vm_readv 310 270, process_vm_writev 311 271,
process_madvise 440 440, process_mrelease 448 448, setpriority 141 140, ioprio_set 251 30,
sched_setaffinity 203 122, sched_setscheduler 144 119, sched_setparam 142 118,
sched_setattr 314 274, unshare 272 97, setns 308 268, mount 165 40, umount2 166 39,
pivot_root 155 41, chroot 161 51, fsopen 430 430, fsmount 432 432, fsconfig 431 431, fspick 433 433,
open_tree 428 428, open_tree_attr 467 467, move_mount 429 429, mount_setattr 442 442, bpf 321 280,
perf_event_open 298 241, userfaultfd 323 282, io_uring_setup 425 425, keyctl 250 219,
add_key 248 217, request_key 249 218, shmget 29 194, semget 64 190, msgget 68 186, mq_open 240 180,
memfd_create 319 279, memfd_secret 447 447, open_by_handle_at 304 265, name_to_handle_at 303 264,
fanotify_init 300 262, inotify_init 253 -1, inotify_init1 294 26, personality 135 92,
truncate 76 45, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463,
removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466,
file_setattr 469 469"""
ABSENT = "clone3 435 435, openat2 437 437"      # libc then falls back to clone and openat
# Landlock does not see these, and shutil.copy must not fail over them: nothing happens, quietly.
PRETENDED = """chmod 90 -1, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -1,
lchown 94 -1, fchown 93 55, fchownat 260 54, utime 132 -1, utimes 235 -1, futimesat 261 -1,
utimensat 280 88"""
TRUNCATES = os.O_ACCMODE | os.O_TRUNC           # to open for reading may empty a file, too
FILTERED = [("prctl 157 167", 0, 0xFFFFFFFF, 1, True),          # argument, mask, value; refused
            ("prlimit64 302 261", 0, 0xFFFFFFFF, 0, False),     # if equal (True), if not (False)
            ("open 2 -1", 1, TRUNCATES, os.O_TRUNC, True),
            ("openat 257 56", 2, TRUNCATES, os.O_TRUNC, True),
            *(("fcntl 72 25", 1, 0xFFFFFFFF, command, True) for command in (8, 10, 15)),
            *(("ioctl 16 29", 1, 0xFFFFFFFF, command, True) for command in (0x8901, 0x8902))]
# (The last two rows: who gets a signal, and which, when a file has data.)


def numbers(table: str) -> list[int]:
    column = 1 + list(MACHINES).index(MACHINE)
    return [n for row in table.split(",") if (n := int(row.split()[column])) >= 0]


@functools.cache
def call_filter() -> bytes:
    """Refuse what a program with one process, one thread and its own files does not need.

    A filter is a list of (operation, jump if so, jump if not, operand), see linux/filter.h. It
    may load from struct seccomp_data: the number at 0, the machine at 4, the arguments from 16."""
    load, equal, at_least, mask_by, give = 0x20, 0x15, 0x35, 0x54, 0x06
    allow, kill, error = 0x7FFF0000, 0x80000000, 0x50000
    program = [(load, 0, 0, 4), (equal, 1, 0, MACHINES[MACHINE]), (give, 0, 0, kill),
               (load, 0, 0, 0)]
    if MACHINE == "x86_64":     # the x32 numbers are a second door to the same rooms
        program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, error | errno.ENOSYS)]
    for table, code in (REFUSED, errno.EPERM), (ABSENT, errno.ENOSYS), (PRETENDED, 0):
        for number in numbers(table):
            program += [(equal, 0, 1, number), (give, 0, 0, error | code)]
    for table, argument, mask, value, if_equal in FILTERED:
        for number in numbers(table):
            program += [(equal, 0, 5, number), (load, 0, 0, 16 + 8 * argument),
                        (mask_by, 0, 0, mask), (equal, not if_equal, if_equal, value),
                        (give, 0, 0, error | errno.EPERM), (load, 0, 0, 0)]
    program.append((give, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *line) for line in program)


def seccomp() -> str:
    code = ctypes.create_string_buffer(call_filter())
    header = struct.pack("HxxxxxxQ", len(call_filter()) // struct.calcsize("HBBI"),
                         ctypes.addressof(code))
    check(libc.prctl(22, 2, header, 0, 0), "seccomp")       # PR_SET_SECCOMP, filter
    return f"seccomp, {len(numbers(REFUSED))} calls refused"


def check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def landlock_abi() -> int:
    return max(0, libc.syscall(444, None, ctypes.c_size_t(0), ctypes.c_uint(1)))    # 0: none


def landlock(readable: list[str], writable: str) -> str:
    """From here on: read in some folders, write in one; the kernel refuses the rest."""
    abi = landlock_abi()
    rights = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1       # all this kernel can refuse
    ruleset = struct.pack("QQQ", rights, 3, 3)                      # files; TCP; sockets, signals
    ruleset = ruleset[:8 if abi < 4 else 16 if abi < 6 else 24]
    rules = check(libc.syscall(444, ruleset, ctypes.c_size_t(len(ruleset)), ctypes.c_uint(0)),
                  "landlock_create_ruleset")
    read, write = 1 << 2 | 1 << 3, 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 13 | 1 << 14
    for path in filter(os.path.exists, [*readable, writable]):      # write: no links, no devices
        allowed = read | write if path == writable else read if os.path.isdir(path) else 1 << 2
        target = os.open(path, os.O_PATH)
        rule = struct.pack("=Qi", allowed & rights, target)
        check(libc.syscall(445, rules, 1, rule, 0), f"landlock_add_rule {path}")
        os.close(target)
    check(libc.syscall(446, rules, 0), "landlock_restrict_self")
    os.close(rules)
    return f"Landlock ABI {abi}"


def missing_walls() -> dict[str, str]:
    """Without these two there is no sandbox: what is missing, and which wall falls with it."""
    tests = (("Landlock (Linux 5.13 or newer, switched on)", "files", landlock_abi() > 0),
             (f"table of system calls for {MACHINE}", "calls", MACHINE in MACHINES))
    return {what: wall for what, wall, there in tests if not there}


def private_disk(folder: str, size: int) -> str:
    """Mount a tmpfs that only this process sees and that vanishes with it, if we may."""
    uid, gid, polled = os.getuid(), os.getgid(), "polled quota"
    if libc.unshare(0x20000):                       # CLONE_NEWNS; an ordinary user needs more:
        if libc.unshare(0x10020000):                # CLONE_NEWUSER
            return polled
        for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                           ("gid_map", f"{gid} {gid} 1")):
            try:
                with open(f"/proc/self/{name}", "w") as file:
                    file.write(line)
            except OSError:
                return polled
    options = f"size={size},nr_inodes=2000,mode=755".encode()
    if (libc.mount(None, b"/", None, ctypes.c_ulong(0x44000), None)         # MS_REC | MS_PRIVATE
            or libc.mount(b"tmpfs", folder.encode(), b"tmpfs", ctypes.c_ulong(14), options)):
        return polled                               # 14: no suid, no devices, no programs
    return f"private tmpfs, {size >> 20} MB"


def lock_in(setup: dict, folder: str, image: Image.Image, parent: int) -> dict[str, str]:
    """Put up the walls in the one order that works; say which ones stand."""
    walls, stand = set(setup["walls"]), dict.fromkeys(sorted(WALLS), "none")
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")                      # short of memory, the trainer goes last
    except OSError:
        pass                                        # /proc is read-only in some containers
    size = setup["disk"] + 3 * image.width * image.height + (1 << 20)
    stand["disk"] = private_disk(folder, size) if "disk" in walls else "polled quota"
    os.mkdir(f"{folder}/work")
    image.save(f"{folder}/image.png", compress_level=0)             # no metadata, neutral name
    if "sizes" in walls:
        for name, value in (("AS", setup["memory"]), ("FSIZE", setup["file"]), ("NOFILE", 64),
                            ("CPU", 3600), ("CORE", 0), ("MSGQUEUE", 0), ("MEMLOCK", 0)):
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]      # nobody may raise it; -1: there is none
            resource.setrlimit(kind, (value if hard < 0 else min(value, hard),) * 2)
        stand["sizes"] = f"rlimits, {setup['memory'] >> 20} MB of memory"
    if "rights" in walls:
        for capability in range(64):
            libc.prctl(24, capability, 0, 0, 0)     # PR_CAPBSET_DROP
        capset = 126 if MACHINE == "x86_64" else 91
        check(libc.syscall(capset, struct.pack("Ii", 0x20080522, 0), bytes(24)), "capset")
        stand["rights"] = "no capabilities"
    check(libc.prctl(1, signal.SIGKILL, 0, 0, 0), "PR_SET_PDEATHSIG")       # not without the server
    if os.getppid() != parent:
        os._exit(0)
    check(libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if "files" in walls:
        system = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/fonts", "/dev/null",
                  "/dev/zero", "/dev/urandom", sys.prefix, sys.base_prefix]
        packages = [path for path in sys.path if path.endswith("-packages")]
        stand["files"] = landlock([*system, *packages, folder], f"{folder}/work")
    if "calls" in walls:
        stand["calls"] = seccomp()
    return stand
